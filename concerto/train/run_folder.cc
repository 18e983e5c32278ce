#include "concerto/train/run_folder.h"

#include <filesystem>

#include "concerto/checkpoint/checkpoint.h"
#include "concerto/train/record_file.h"

namespace concerto {
namespace fs = std::filesystem;

static void refuse_other_settings(const RunConfig& config, const std::string& yaml_path) {
  if (!fs::exists(yaml_path)) return;
  const RunConfig before = load_run_config(yaml_path, {});
  if (run_config_hash(before) == run_config_hash(config)) return;
  std::string text = "this folder holds a run with other settings:";
  for (const std::string& line : run_config_differences(before, config)) text += "\n  " + line;
  throw Error(ErrorCode::kConfig, config.run.dir, text + "\n",
              "Choose another run.dir, or the settings of " + yaml_path + ".");
}

RunFolder::RunFolder(const RunConfig& config) : dir_(config.run.dir), lock_(dir_) {
  refuse_other_settings(config, file("config.yaml"));
  if (config.run.resume == "auto") {
    LatestCheckpoint latest = find_latest(dir_);
    resume_path_ = latest.path;
    notes_ = std::move(latest.skipped);
  } else if (config.run.resume == "never") {
    if (!list_checkpoints(dir_).empty())
      throw Error(ErrorCode::kConfig, dir_, "holds checkpoints, and run.resume is never",
                  "Choose another run.dir, or resume: auto.");
  } else {
    resume_path_ = config.run.resume;
  }
}

void RunFolder::write_config(const RunConfig& config) const {
  write_file_atomically(file("config.yaml"), run_config_yaml(config));
}

}  // namespace concerto
