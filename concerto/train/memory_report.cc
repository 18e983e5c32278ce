#include "concerto/train/memory_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <span>
#include <string_view>

#include "concerto/base/control_groups.h"
#include "concerto/base/error.h"
#include "concerto/train/human_units.h"

namespace concerto {
namespace {

// The number after `name` in lines as "VmRSS:	    1234 kB"; 0: there is none.
int64_t number_after(std::string_view status, std::string_view name) {
  const size_t at = status.find(name);
  if (at == std::string_view::npos) return 0;
  status.remove_prefix(at + name.size());
  status.remove_prefix(std::min(status.find_first_not_of(" \t"), status.size()));
  int64_t value = 0;
  std::from_chars(status.data(), status.data() + status.size(), value);
  return value;
}

int64_t kilobytes(std::string_view status, std::string_view name) { return number_after(status, name) * 1024; }

// ---- Control groups.

constexpr int64_t kNoLimit = int64_t{1} << 62;  // and what is above: version 1 writes the largest multiple of a page

// The names of files and of lines that the two versions give the same things.
struct GroupFiles {
  const char *limit, *usage, *swap_limit, *swap_usage;
  std::string_view inactive, active;  // in memory.stat
  bool swap_holds_both;               // memory and swap together, not swap alone
};
constexpr GroupFiles kVersion1 = {"memory.limit_in_bytes",
                                  "memory.usage_in_bytes",
                                  "memory.memsw.limit_in_bytes",
                                  "memory.memsw.usage_in_bytes",
                                  "\ntotal_inactive_file ",
                                  "\ntotal_active_file ",
                                  true};
constexpr GroupFiles kVersion2 = {
    "memory.max", "memory.current", "memory.swap.max", "memory.swap.current", "\ninactive_file ", "\nactive_file ",
    false};

// "max", a number, or no such file (as at the top of version 2).
int64_t read_limit(const std::string& path) {
  char text[64];
  const std::string_view file = read_kernel_file(path.c_str(), text);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(file.data(), file.data() + file.size(), value);
  return error == std::errc() ? std::min(value, kNoLimit) : kNoLimit;
}

int64_t read_bytes(const std::string& path) {
  const int64_t value = read_limit(path);
  return value == kNoLimit ? 0 : value;
}

// What is left in one group, with at most `swap` bytes of swap.
int64_t room_of_group(const std::string& dir, const GroupFiles& f, int64_t swap) {
  const int64_t limit = read_limit(dir + f.limit), swap_limit = read_limit(dir + f.swap_limit);
  if (limit == kNoLimit && (!f.swap_holds_both || swap_limit == kNoLimit)) return kNoLimit;
  char text[8192];
  text[0] = '\n';  // a name is looked for at the beginning of a line
  const size_t size = read_kernel_file((dir + "memory.stat").c_str(), std::span(text).subspan(1)).size();
  const std::string_view stat(text, size + 1);
  const int64_t files = number_after(stat, f.inactive) + number_after(stat, f.active);
  const int64_t memory = limit - std::max<int64_t>(0, read_bytes(dir + f.usage) - files);
  const int64_t swap_left = swap_limit == kNoLimit ? kNoLimit : swap_limit - read_bytes(dir + f.swap_usage);
  if (f.swap_holds_both)
    return std::min(limit == kNoLimit ? kNoLimit : memory + swap, swap_left == kNoLimit ? kNoLimit : swap_left + files);
  return memory + std::min(swap, swap_left);
}

// The least over the process's group and those above it.
int64_t room_of_groups(const std::string& root, int64_t swap) {
  int64_t room = kNoLimit;
  for_each_control_group(root, "memory", [&](const std::string& dir, bool version1) {
    room = std::min(room, room_of_group(dir, version1 ? kVersion1 : kVersion2, swap));
  });
  return room;
}

}  // namespace

int64_t read_available_memory(const std::string& root) {
  char text[8192];
  const std::string_view info = read_kernel_file((root + "/proc/meminfo").c_str(), text);
  const int64_t swap = kilobytes(info, "\nSwapFree:"), machine = kilobytes(info, "\nMemAvailable:") + swap;
  const int64_t group = room_of_groups(root, swap);
  if (group == kNoLimit) return machine;
  const int64_t least = machine > 0 ? std::min(machine, group) : group;
  return std::max<int64_t>(1, least);  // 0 would say that nothing is known
}

void check_memory(int64_t wanted, int64_t available) {
  if (available <= 0 || wanted <= available) return;
  throw Error(ErrorCode::kMemory, "memory",
              fmt::format("the run would take {}, {} are free", format_bytes(wanted), format_bytes(available)),
              "Use a smaller training.micro_batch_size or seq_length, parallel.recompute: full, or a smaller model.");
}

ProcessMemory read_process_memory() {
  char text[8192];
  const std::string_view status = read_kernel_file("/proc/self/status", text);
  return {.rss_bytes = kilobytes(status, "\nVmRSS:"),
          .peak_bytes = kilobytes(status, "\nVmHWM:"),
          .anonymous_bytes = kilobytes(status, "\nRssAnon:")};
}

double MemoryReport::error() const {
  if (predicted_bytes <= 0) return 0;
  return static_cast<double>(peak_bytes) / static_cast<double>(predicted_peak_bytes()) - 1;
}

std::string format_memory_report(const MemoryReport& r) {
  const std::string real = "real " + format_bytes(r.peak_bytes);
  if (r.predicted_bytes <= 0) return real;
  return fmt::format("predicted {} ({} process + {} run), {} ({:+.1f} %)", format_bytes(r.predicted_peak_bytes()),
                     format_bytes(r.baseline_bytes), format_bytes(r.predicted_bytes), real, 100 * r.error());
}

}  // namespace concerto
