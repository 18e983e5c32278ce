#include "concerto/base/cores.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "concerto/base/control_groups.h"
#include "concerto/base/error.h"

namespace concerto {
namespace {

using Mask = std::array<cpu_set_t, kMostCores / CPU_SETSIZE>;

// All digits and in range.
bool parse_core(std::string_view text, int& core) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), core);
  return error == std::errc() && end == text.data() + text.size() && core >= 0 && core < kMostCores;
}

// A number in a file of a control group; `none` where it says "max", -1 or nothing.
double number_in(std::string_view text, double none) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && value > 0 ? value : none;
}

// Processors' worth of time that a group may use; 0: no limit.
double quota_of_group(const std::string& dir, bool version1) {
  char text[64], period[64];
  if (version1) {
    const double us = number_in(read_kernel_file((dir + "cpu.cfs_quota_us").c_str(), text), 0);
    return us / number_in(read_kernel_file((dir + "cpu.cfs_period_us").c_str(), period), 1e5);
  }
  const std::string_view both = read_kernel_file((dir + "cpu.max").c_str(), text);  // "150000 100000", "max 100000"
  const size_t space = std::min(both.find(' '), both.size());
  return number_in(both.substr(0, space), 0) / number_in(both.substr(std::min(space + 1, both.size())), 1e5);
}

}  // namespace

std::string parse_cores(std::string_view text, std::vector<int>& cores) {
  cores.clear();
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string_view item = text.substr(at, end - at);
    const size_t dash = std::min(item.find('-'), item.size());
    int first = 0, last = 0;
    if (!parse_core(item.substr(0, dash), first) || (dash < item.size() && !parse_core(item.substr(dash + 1), last)))
      return fmt::format("'{}' is no core number below {} and no range of them", item, kMostCores);
    if (dash == item.size()) last = first;
    if (last < first) return fmt::format("'{}' ends before it begins", item);
    for (int core = first; core <= last; ++core) {
      if (std::find(cores.begin(), cores.end(), core) != cores.end()) return fmt::format("{} is named twice", core);
      cores.push_back(core);
    }
    at = end + 1;
  }
  return "";
}

std::string format_cores(const std::vector<int>& cores) {
  std::string text;
  for (size_t i = 0; i < cores.size();) {
    size_t last = i;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cores[i]);
    if (last > i) text += fmt::format("-{}", cores[last]);
    i = last + 1;
  }
  return text;
}

std::vector<int> allowed_cores() {
  Mask mask{};
  std::vector<int> cores;
  if (::sched_getaffinity(0, sizeof mask, mask.data()) != 0) return cores;
  for (int core = 0; core < kMostCores; ++core)
    if (CPU_ISSET_S(static_cast<size_t>(core), sizeof mask, mask.data())) cores.push_back(core);
  return cores;
}

bool set_allowed_cores(const std::vector<int>& cores) {
  Mask mask{};
  for (const int core : cores) {
    CHECK(core >= 0 && core < kMostCores, "core {}", core);
    CPU_SET_S(static_cast<size_t>(core), sizeof mask, mask.data());
  }
  return ::sched_setaffinity(0, sizeof mask, mask.data()) == 0;
}

void check_cores(const std::vector<int>& cores) {
  const std::vector<int> allowed = allowed_cores();
  const long there = ::sysconf(_SC_NPROCESSORS_CONF);
  std::vector<int> absent, forbidden;
  for (const int core : cores) {
    if (std::find(allowed.begin(), allowed.end(), core) != allowed.end()) continue;
    (core >= there ? absent : forbidden).push_back(core);
  }
  if (!absent.empty())
    throw Error(ErrorCode::kConfig, "run.cores",
                fmt::format("{}: this machine has cores 0-{}", format_cores(absent), there - 1),
                fmt::format("Choose among {}.", format_cores(allowed)));
  if (!forbidden.empty())
    throw Error(ErrorCode::kConfig, "run.cores",
                fmt::format("{}: this process may run on {} only (taskset, container or batch system)",
                            format_cores(forbidden), format_cores(allowed)),
                "Choose among these.");
}

int usable_cores(const std::string& root) {
  double most = std::max<double>(1, static_cast<double>(allowed_cores().size()));
  for_each_control_group(root, "cpu", [&](const std::string& dir, bool version1) {
    const double quota = quota_of_group(dir, version1);
    if (quota > 0) most = std::min(most, std::ceil(quota));
  });
  return static_cast<int>(most);
}

}  // namespace concerto
