#include "concerto/train/run_folder.h"

#include <fmt/ranges.h>

#include <filesystem>

#include "concerto/base/files.h"
#include "concerto/checkpoint/checkpoint.h"

namespace concerto {
namespace fs = std::filesystem;

// A folder without a checkpoint binds nobody: its run starts from the beginning anyway.
static void refuse_other_settings(const RunConfig& config, const std::string& yaml_path) {
  if (!fs::exists(yaml_path) || list_checkpoints(config.run.dir).empty()) return;
  RunConfig before;
  try {
    before = load_run_config(yaml_path, {});
  } catch (const Error& e) {
    throw Error(ErrorCode::kCheckpoint, config.run.dir,
                fmt::format("the settings of its run cannot be read: {}", e.what()),
                "Remove that file to go on; the checkpoints know the settings too.");
  }
  if (run_config_hash(before) == run_config_hash(config)) return;
  std::string text = "made with other settings (here: in the folder, there: asked for):";
  for (const std::string& line : run_config_differences(before, config)) text += "\n  " + line;
  throw Error(ErrorCode::kCheckpoint, config.run.dir, text,
              "\nChoose another run.dir; to start it from this run's weights, set model.path to its model folder and "
              "model.init to pretrained.");
}

RunFolder::RunFolder(const RunConfig& config) : dir_(config.run.dir), lock_(dir_) {
  refuse_other_settings(config, file("config.yaml"));
  if (config.run.resume == "auto") {
    LatestCheckpoint latest = find_latest(dir_);
    resume_path_ = latest.path;
    notes_ = std::move(latest.skipped);
    // To start anew would write over what may still be mended.
    if (resume_path_.empty() && !notes_.empty())
      throw Error(ErrorCode::kCheckpoint, dir_,
                  fmt::format("no checkpoint of it can be used:\n  {}", fmt::join(notes_, "\n  ")),
                  "\nMend one, or choose another run.dir to start anew.");
  } else if (config.run.resume == "never") {
    if (!list_checkpoints(dir_).empty())
      throw Error(ErrorCode::kCheckpoint, dir_, "holds checkpoints, and run.resume is never",
                  "Choose another run.dir, or resume: auto.");
  } else {
    resume_path_ = follow_latest(config.run.resume);
  }
}

void RunFolder::write_config(const RunConfig& config) const {
  write_file_atomic(file("config.yaml"), run_config_yaml(config));
}

}  // namespace concerto
