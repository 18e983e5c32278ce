#include "concerto/checkpoint/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "concerto/checkpoint/manifest.h"
#include "concerto/checkpoint/rank_reports.h"

namespace concerto {
namespace {

struct Candidate {
  std::string path;
  int64_t step, sequence;
};

// Folders named checkpoint-<digits>, the last saved first.
std::vector<Candidate> candidates(const std::string& run_dir) {
  constexpr std::string_view prefix = "checkpoint-";
  std::vector<Candidate> found;
  for (const std::string& name : list_directory(run_dir)) {
    if (!name.starts_with(prefix) || name.size() == prefix.size() || name.size() > prefix.size() + 18) continue;
    const std::string digits = name.substr(prefix.size());
    if (digits.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string path = run_dir + "/" + name;
    if (is_directory(path)) found.push_back({path, std::stoll(digits), peek_sequence(path + "/" + kManifestFile)});
  }
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    return std::pair(a.sequence, a.step) > std::pair(b.sequence, b.step);
  });
  return found;
}

}  // namespace

std::string follow_latest(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash);
  if (path.substr(slash == std::string::npos ? 0 : slash + 1) != "latest" || is_directory(path) || !path_exists(path))
    return path;
  std::string name = read_text_file(path, 256);
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r')) name.pop_back();
  return folder + "/" + name;
}

std::string checkpoint_path(const std::string& run_dir, int64_t step) {
  return fmt::format("{}/checkpoint-{}", run_dir, step);
}

int64_t next_sequence(const std::string& run_dir) {
  int64_t last = 0;
  for (const Candidate& one : candidates(run_dir)) last = std::max(last, one.sequence);
  return last + 1;
}

std::vector<CheckpointInfo> list_checkpoints(const std::string& run_dir) {
  std::vector<CheckpointInfo> infos;
  for (const Candidate& candidate : candidates(run_dir)) {
    CheckpointInfo info{candidate.path, candidate.step, candidate.sequence, std::nullopt, ""};
    try {
      const CheckpointReader reader(candidate.path);
      reader.check_files();
      info.valid_loss = reader.meta().valid_loss;
      if (reader.meta().step != candidate.step) info.fault = fmt::format("holds step {}", reader.meta().step);
    } catch (const Error& e) {
      info.fault = e.what();
    }
    infos.push_back(std::move(info));
  }
  std::sort(infos.begin(), infos.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step < b.step; });
  return infos;
}

LatestCheckpoint find_latest(const std::string& run_dir, Communicator* world) {
  const RankReports reports(world);
  const nlohmann::json names = nlohmann::json::parse(reports.announce([&] {
    nlohmann::json list = nlohmann::json::array();
    for (const Candidate& candidate : candidates(run_dir)) list.push_back({file_name(candidate.path), candidate.step});
    return list.dump();
  }));
  LatestCheckpoint latest;
  for (const nlohmann::json& name : names) {
    const std::string path = run_dir + "/" + name[0].get<std::string>();
    try {
      reports.agree([&] {
        CheckpointReader(path).verify({}, reports.rank(), reports.size());
        return std::string();
      });
      latest.path = path;
      latest.step = name[1];
      return latest;
    } catch (const Error& e) {
      if (e.code == ErrorCode::kComm) throw;
      latest.skipped.push_back(fmt::format("{}: {}", file_name(path), e.what()));
    }
  }
  return latest;
}

std::vector<std::string> remove_old_checkpoints(const std::string& run_dir, int64_t keep, bool keep_best) {
  CHECK(keep >= 1, "keep {}", keep);
  std::vector<std::string> removed;
  for (const std::string& name : list_directory(run_dir))
    if (name.starts_with("checkpoint-") && name.ends_with(".tmp")) remove_tree(run_dir + "/" + name);
  std::vector<CheckpointInfo> infos = list_checkpoints(run_dir);
  std::erase_if(infos, [](const CheckpointInfo& info) { return !info.fault.empty(); });
  std::sort(infos.begin(), infos.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.sequence > b.sequence; });
  const CheckpointInfo* best = nullptr;
  for (const CheckpointInfo& info : infos)
    if (keep_best && info.valid_loss && !std::isnan(*info.valid_loss) &&
        (!best || *info.valid_loss < *best->valid_loss))
      best = &info;
  for (size_t i = static_cast<size_t>(keep); i < infos.size(); ++i) {
    if (&infos[i] == best) continue;
    // Half removed is not half a checkpoint: it loses its name first.
    rename_path(infos[i].path, infos[i].path + ".tmp");
    remove_tree(infos[i].path + ".tmp");
    removed.push_back(infos[i].path);
  }
  return removed;
}

}  // namespace concerto
