#include "concerto/cli/model_folder.h"

#include "concerto/base/files.h"
#include "concerto/checkpoint/checkpoint.h"
#include "concerto/train/human_units.h"

namespace concerto {

std::string model_folder(const std::string& path) {
  const auto without_model = [&](const std::string& checkpoint) {
    return Error(ErrorCode::kModel, path, "holds a checkpoint, not a Hugging Face folder",
                 fmt::format("Make one: concerto checkpoint export {} --output DIR.", shell_word(checkpoint)));
  };
  if (!path_exists(path))
    throw Error(ErrorCode::kModel, path, "there is no such folder", "Give a Hugging Face folder or a run folder.");
  if (path_exists(path + "/manifest.json")) throw without_model(path);
  if (path_exists(path + "/config.json") || !is_directory(path)) return path;
  if (path_exists(path + "/model/config.json")) return path + "/model";
  if (path_exists(path + "/latest") || !list_checkpoints(path).empty()) throw without_model(path);
  throw Error(ErrorCode::kModel, path, "holds no config.json",
              "Give a Hugging Face folder or the folder of a finished run.");
}

}  // namespace concerto
