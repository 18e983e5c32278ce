#include "concerto/cli/rank_agreement.h"

#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <span>

#include "concerto/base/cores.h"
#include "concerto/base/hash.h"

namespace concerto {
namespace {

using Settings = std::vector<std::pair<std::string, std::string>>;

// The linker's note about the contents of the program file; empty if it was linked without one.
int find_build_id(dl_phdr_info* program, size_t, void* out) {
  for (int i = 0; i < program->dlpi_phnum; ++i) {
    const auto& segment = program->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* at = reinterpret_cast<const char*>(program->dlpi_addr + segment.p_vaddr);
    const char* const end = at + segment.p_memsz;
    const auto padded = [](uint32_t n) { return (n + 3) & ~uint32_t{3}; };
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      const auto* note = reinterpret_cast<const ElfW(Nhdr)*>(at);
      const char* name = at + sizeof(*note);
      const char* value = name + padded(note->n_namesz);
      if (note->n_type == NT_GNU_BUILD_ID && std::string_view(name, note->n_namesz) == std::string_view("GNU", 4))
        for (uint32_t b = 0; b < note->n_descsz; ++b)
          *static_cast<std::string*>(out) += fmt::format("{:02x}", static_cast<unsigned char>(value[b]));
      at = value + padded(note->n_descsz);
    }
  }
  return 1;  // only the first one, the program itself
}

std::vector<int64_t> gather(Communicator& world, int64_t mine) {
  const auto n = static_cast<size_t>(world.size());
  std::vector<int64_t> all(n);
  std::vector<View> parts(n);
  for (size_t r = 0; r < n; ++r) parts[r] = View(&all[r], {1}, DType::kI64);
  world.all_gather(View(&mine, {1}, DType::kI64), parts);
  return all;
}

std::vector<std::string> gather(Communicator& world, std::string mine) {
  const std::vector<int64_t> sizes = gather(world, static_cast<int64_t>(mine.size()));
  std::vector<std::string> all(sizes.size());
  std::vector<View> parts(sizes.size());
  for (size_t r = 0; r < sizes.size(); ++r) {
    all[r].resize(static_cast<size_t>(sizes[r]));
    if (sizes[r] > 0) parts[r] = View(all[r].data(), {sizes[r]}, DType::kU8);
  }
  world.all_gather(mine.empty() ? View() : View(mine.data(), {static_cast<int64_t>(mine.size())}, DType::kU8), parts);
  return all;
}

int64_t as_signed(uint64_t hash) { return static_cast<int64_t>(hash); }

std::string one_text(const std::string& program, const Settings& settings) {
  std::string text = program + "\n";
  for (const auto& [key, value] : settings) text += key + "=" + value + "\n";
  return text;
}

// What of `theirs` differs from `mine`, line by line of one_text().
std::string differences(const std::string& mine, const std::string& theirs) {
  const auto read = [](const std::string& text, std::string& program) {
    std::map<std::string, std::string> settings;
    size_t at = text.find('\n');
    program = text.substr(0, at);
    for (++at; at < text.size();) {
      const size_t end = text.find('\n', at), equals = text.find('=', at);
      settings[text.substr(at, equals - at)] = text.substr(equals + 1, end - equals - 1);
      at = end + 1;
    }
    return settings;
  };
  std::string program, other_program, out;
  const auto here = read(mine, program);
  auto there = read(theirs, other_program);
  const auto add = [&](const std::string& line) { out += (out.empty() ? "" : "; ") + line; };
  if (program != other_program) add(fmt::format("runs {}, not {}", other_program, program));
  constexpr int kMost = 5;
  int count = 0;
  for (const auto& [key, value] : here) {
    const auto it = there.find(key);
    const std::string other = it == there.end() ? "nothing" : it->second;
    if (it != there.end()) there.erase(it);
    if (other != value && ++count <= kMost) add(fmt::format("{} is {}, not {}", key, other, value));
  }
  for (const auto& [key, value] : there)
    if (++count <= kMost) add(fmt::format("{} is {}, not nothing", key, value));
  if (count > kMost) add(fmt::format("{} more settings", count - kMost));
  return out;
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

std::string program_identity() {
  std::string id;
  ::dl_iterate_phdr(find_build_id, &id);
  return fmt::format("concerto {}{}", CONCERTO_VERSION, id.empty() ? "" : ", build " + id);
}

Settings shared_settings(const RunConfig& config) {
  Settings all = run_config_settings(config);
  std::erase_if(all, [](const auto& s) { return s.first == "run.threads" || s.first == "run.cores"; });
  return all;
}

void agree_on_start(Communicator& world, const std::exception_ptr& fault) {
  const CommScope scope("start");
  const std::vector<int64_t> faults = gather(world, fault ? 1 : 0);
  const auto first = std::find(faults.begin(), faults.end(), 1);
  if (first == faults.end()) return;
  if (first - faults.begin() == world.rank()) std::rethrow_exception(fault);
  world.barrier();  // which that rank ends
}

void check_same_job(Communicator& world, const std::string& program, const Settings& settings) {
  const CommScope scope("compare settings");
  const std::string mine = one_text(program, settings);
  const std::vector<int64_t> hashes = gather(world, as_signed(hash64(mine)));
  if (std::all_of(hashes.begin(), hashes.end(), [&](int64_t h) { return h == hashes[0]; })) return;
  const std::vector<std::string> texts = gather(world, mine);
  if (world.rank() != 0) return world.barrier();  // which rank 0 ends
  std::map<std::string, std::vector<int>> others;
  for (size_t r = 1; r < texts.size(); ++r)
    if (texts[r] != texts[0]) others[texts[r]].push_back(static_cast<int>(r));
  std::string what;
  for (const auto& [text, ranks] : others)
    what += fmt::format("{}{}: {}", what.empty() ? "" : "\n  ", ranks_text(ranks), differences(texts[0], text));
  throw Error(ErrorCode::kConfig, "another job than rank 0's", what,
              "Start all ranks with the same program and the same settings.");
}

MachineShare machine_share(Communicator& world) {
  const CommScope scope("count ranks of a machine");
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  const std::string place = fmt::format("{} {}", host, format_cores(allowed_cores()));
  const std::vector<int64_t> places = gather(world, as_signed(hash64(place)));
  const int64_t mine = places[static_cast<size_t>(world.rank())];
  return {static_cast<int>(std::count(places.begin(), places.end(), mine)),
          static_cast<int>(std::count(places.begin(), places.begin() + world.rank(), mine))};
}

}  // namespace concerto
