#include <nlohmann/json.hpp>
#include <optional>

#include "concerto/base/files.h"
#include "concerto/base/hash.h"
#include "concerto/checkpoint/checkpoint.h"
#include "concerto/checkpoint/manifest.h"
#include "concerto/checkpoint/rank_reports.h"

namespace concerto {
namespace {

using nlohmann::json;

// Writes a rank's files. Returns {"hashes": [of every slice], "files": [[bytes, header hash], ...]}.
std::string write_files(const std::string& dir, const std::vector<SavePlan::File>& files,
                        std::span<const NamedTensor> tensors, const SaveOptions& options, int64_t step) {
  int64_t done = 0, all = 0;
  for (const SavePlan::File& file : files) all += static_cast<int64_t>(file.tensors.size());
  json report{{"hashes", json::array()}, {"files", json::array()}};
  for (const SavePlan::File& file : files) {
    std::vector<TensorInfo> infos;
    for (const size_t i : file.tensors)
      infos.push_back({tensors[i].name, tensors[i].view.shape, options.dtype.value_or(tensors[i].view.dtype)});
    // Every file says of which save it is: one that strays into another checkpoint is known.
    SafetensorsWriter writer(dir + "/" + file.name, std::move(infos), {{kStepKey, std::to_string(step)}});
    for (const size_t i : file.tensors) {
      if (options.progress) options.progress(done++, all);
      const NamedTensor& tensor = tensors[i];
      const bool here = tensor.view.data || tensor.view.elements() == 0;
      CHECK(here || options.source, "{} has no memory", tensor.name);
      report["hashes"].push_back(writer.write(here ? tensor.view : options.source(tensor)));
    }
    writer.finish();
    report["files"].push_back({writer.bytes(), writer.header_hash()});
  }
  return report.dump();
}

// Adds what the ranks have written to the manifest.
void collect(const SavePlan& plan, const std::vector<std::string>& texts, Manifest& manifest) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const json report = json::parse(texts[rank]);
    const std::vector<SavePlan::Slice>& slices = plan.slices()[rank];
    CHECK(report["hashes"].size() == slices.size(), "rank {} wrote {} slices of {}", rank, report["hashes"].size(),
          slices.size());
    for (size_t i = 0; i < slices.size(); ++i) {
      const SavePlan::Slice& s = slices[i];
      manifest.tensors.push_back({s.name, s.shape, s.dtype, s.expert, s.box, s.file, report["hashes"][i]});
    }
    for (size_t i = 0; i < report["files"].size(); ++i)
      manifest.files.push_back(
          {plan.file_names()[manifest.files.size()], report["files"][i][0], report["files"][i][1]});
  }
}

}  // namespace

std::string save_checkpoint(const std::string& run_dir, const CheckpointMeta& meta,
                            std::span<const NamedTensor> tensors, const SaveOptions& options) {
  const CommScope scope("save of a checkpoint");
  const RankReports reports(options.world);
  const SaveRules rules{options.max_shard_bytes, options.dtype, options.model, !meta.weights_only};
  SavePlan made_here;
  SavePlan& plan = options.plan ? *options.plan : made_here;
  if (!plan.made()) plan.make(tensors, rules, reports);

  Manifest manifest;
  std::optional<StagedDirectory> staged;  // rank 0's
  const std::string path = checkpoint_path(run_dir, meta.step);
  const std::string dir = reports.announce([&] {
    make_directories(run_dir);
    manifest.sequence = next_sequence(run_dir);
    staged.emplace(path);
    return staged->path();
  });
  const auto write = [&] {
    CHECK(plan.fits(tensors, rules), "the plan is of other tensors");
    if (!is_directory(dir))
      throw Error(ErrorCode::kIo, dir, "rank 0 has made this folder, but it is not there",
                  "Choose a run.dir that all ranks share.");
    return write_files(dir, plan.files(), tensors, options, meta.step);
  };
  const auto complete = [&](const std::vector<std::string>& texts) {
    collect(plan, texts, manifest);
    manifest.meta = meta;
    manifest.model_config_hash = hash64(meta.model_config);
    write_file(dir + "/" + kModelConfigFile, meta.model_config);
    write_file(dir + "/" + kManifestFile, manifest_text(manifest));
    staged->commit(true);
    write_file_atomic(run_dir + "/latest", file_name(path) + "\n");
    return std::string();
  };
  reports.agree(write, complete);
  return path;
}

}  // namespace concerto
