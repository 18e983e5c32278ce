#include "concerto/cli/checkpoint_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/base/json.h"
#include "concerto/checkpoint/hf_convert.h"
#include "concerto/cli/option_checks.h"
#include "concerto/train/human_units.h"
#include "concerto/train/work_line.h"

namespace concerto {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string path, output, tokenizer, dtype = "bf16";
  int64_t shard_bytes = kDefaultShardBytes;
  bool json = false, tensors = false;
};

enum class Kind { kFile, kModel, kCheckpoint, kRun };

Kind kind_of(const std::string& path) {
  if (!path_exists(path)) throw Error(ErrorCode::kIo, path, "there is no such file or folder", "Check the path.");
  if (!is_directory(path)) return Kind::kFile;
  if (path_exists(path + "/manifest.json")) return Kind::kCheckpoint;
  if (path_exists(path + "/model.safetensors") || path_exists(path + "/model.safetensors.index.json"))
    return Kind::kModel;
  if (!list_checkpoints(path).empty()) return Kind::kRun;
  throw Error(ErrorCode::kUsage, path, "is neither a model folder nor a checkpoint nor a run folder with checkpoints",
              "Name one of these, or a safetensors file.");
}

void print(const Json& json) { fmt::print("{}\n", json.dump(-1, ' ', false, Json::error_handler_t::replace)); }

// JSON has no infinity; a number that was never set says null.
Json number(double x) { return std::isfinite(x) ? Json(x) : Json(); }

// What inspect counts over any kind of tensors.
struct Totals {
  int64_t tensors = 0, bytes = 0, parameters = 0;
  std::map<std::string, int64_t> dtypes;

  void add(const std::string& name, const Shape& shape, DType dtype, bool is_weight) {
    ++tensors;
    bytes += shape.elements() * dtype_bytes(dtype);
    ++dtypes[std::string(safetensors_dtype_name(dtype))];
    if (is_weight && !name.ends_with("e_score_correction_bias")) parameters += shape.elements();
  }
  Json json(const char* kind, const std::string& path) const {
    return {{"kind", kind},   {"path", path},     {"tensors", tensors},
            {"bytes", bytes}, {"dtypes", dtypes}, {"parameters", parameters}};
  }
  void print_table() const {
    std::string types;
    for (const auto& [name, count] : dtypes) types += fmt::format("{}{} {}", types.empty() ? "" : ", ", name, count);
    fmt::print("  tensors     {} ({})\n  bytes       {} ({})\n  parameters  {} ({})\n", tensors, types, bytes,
               format_bytes(bytes), parameters, format_count(static_cast<double>(parameters)));
  }
};

Json shape_json(const Shape& shape) {
  Json json = Json::array();
  for (int i = 0; i < shape.rank(); ++i) json.push_back(shape[i]);
  return json;
}

Json tensor_json(const std::string& name, const Shape& shape, DType dtype) {
  return {{"name", name},
          {"shape", shape_json(shape)},
          {"dtype", safetensors_dtype_name(dtype)},
          {"bytes", shape.elements() * dtype_bytes(dtype)}};
}

void print_tensor(const std::string& name, const Shape& shape, DType dtype, const std::string& more = "") {
  fmt::print("{:<5} {:>12} {:<16} {}{}\n", safetensors_dtype_name(dtype), shape.elements() * dtype_bytes(dtype),
             shape.str(), name, more);
}

void print_file_tensor(const Options& options, const SafetensorsEntry& entry, const std::string& file) {
  if (!options.json) return print_tensor(entry.name, entry.shape, entry.dtype);
  Json json = tensor_json(entry.name, entry.shape, entry.dtype);
  json["file"] = file;
  print(json);
}

// A tensor that is whole has a file and a hash, one that is cut a list of slices with theirs.
void print_checkpoint_tensor(const Options& options, const CheckpointReader& reader, const CheckpointTensor& tensor) {
  if (!options.json)
    return print_tensor(tensor.name, tensor.shape, tensor.dtype,
                        tensor.slices.size() > 1 ? fmt::format("  in {} slices", tensor.slices.size()) : "");
  Json json = tensor_json(tensor.name, tensor.shape, tensor.dtype);
  if (tensor.expert >= 0) json["expert"] = tensor.expert;
  Json slices = Json::array();
  for (const StoredSlice& slice : tensor.slices) {
    Json ranges = Json::array();
    for (int i = 0; i < slice.box.rank(); ++i)
      ranges.push_back({slice.box.begin[i], slice.box.begin[i] + slice.box.size[i]});
    slices.push_back({{"file", reader.file_name(slice.file)}, {"hash", hash_text(slice.hash)}, {"slice", ranges}});
  }
  if (slices.size() == 1) {
    json["file"] = slices[0]["file"];
    json["hash"] = slices[0]["hash"];
  } else {
    json["slices"] = std::move(slices);
  }
  print(json);
}

void inspect_files(const Options& options, const char* kind, const std::vector<const SafetensorsFile*>& files) {
  Totals totals;
  for (const SafetensorsFile* file : files)
    for (const SafetensorsEntry& entry : file->entries()) {
      totals.add(entry.name, entry.shape, entry.dtype, true);
      if (options.tensors) print_file_tensor(options, entry, file_name(file->path()));
    }
  if (options.json) {
    Json json = totals.json(kind, options.path);
    json["files"] = files.size();
    print(json);
    return;
  }
  fmt::print("{} ({})\n", options.path, kind);
  totals.print_table();
  fmt::print("  files       {}\n", files.size());
}

void inspect_checkpoint(const Options& options, const std::string& path, bool tensors) {
  const CheckpointReader reader(path);
  reader.check_files();
  Totals totals;
  size_t slices = 0;
  for (const CheckpointTensor& tensor : reader.tensors()) {
    totals.add(tensor.name, tensor.shape, tensor.dtype, tensor.name.starts_with(kWeightPrefix));
    slices += tensor.slices.size();
    if (tensors) print_checkpoint_tensor(options, reader, tensor);
  }
  const CheckpointMeta& meta = reader.meta();
  if (options.json) {
    Json json = totals.json("checkpoint", path);
    json["files"] = reader.file_count();
    json["slices"] = slices;
    json["step"] = meta.step;
    json["samples"] = meta.samples;
    json["config_hash"] = meta.config_hash;
    json["tokenizer"] = meta.tokenizer;
    json["weights_only"] = meta.weights_only;
    json["valid_loss"] = meta.valid_loss ? number(*meta.valid_loss) : Json();
    json["best_valid_loss"] = number(meta.best_valid_loss);
    json["best_step"] = meta.best_step;
    for (const auto& [name, value] : meta.counters) json["counters"][name] = number(value);
    print(json);
    return;
  }
  fmt::print("{} (checkpoint)\n  step        {}\n  samples     {}\n", path, meta.step, meta.samples);
  totals.print_table();
  fmt::print("  files       {} ({} slices)\n  optimizer   {}\n", reader.file_count(), slices,
             meta.weights_only ? "none, starts from zero" : "yes");
  if (meta.valid_loss) fmt::print("  valid loss  {}\n", format_loss(*meta.valid_loss));
  if (meta.best_step >= 0)
    fmt::print("  best        {} at step {}\n", format_loss(meta.best_valid_loss), meta.best_step);
  if (!meta.tokenizer.empty()) fmt::print("  tokenizer   {}\n", meta.tokenizer);
}

// A line a checkpoint; a damaged one is shown with its fault, since finding it is what inspect is for.
void inspect_run(const Options& options) {
  const std::vector<CheckpointInfo> infos = list_checkpoints(options.path);
  int64_t damaged = 0, latest = -1, sequence = 0;
  for (const CheckpointInfo& info : infos) {
    damaged += !info.fault.empty();
    if (info.fault.empty() && info.sequence > sequence) {
      sequence = info.sequence;
      latest = info.step;
    }
    if (options.json) {
      print({{"path", info.path},
             {"step", info.step},
             {"valid_loss", info.valid_loss ? number(*info.valid_loss) : Json()},
             {"fault", info.fault}});
    } else {
      fmt::print("step {:>8}  {}{}\n", info.step, info.path,
                 !info.fault.empty() ? "  DAMAGED: " + info.fault
                 : info.valid_loss   ? "  valid loss " + format_loss(*info.valid_loss)
                                     : "");
    }
  }
  if (options.json)
    print({{"kind", "run"},
           {"path", options.path},
           {"checkpoints", infos.size()},
           {"damaged", damaged},
           {"latest", latest}});
  else
    fmt::print("{} (run): {} checkpoints, {} damaged, latest is step {}\n", options.path, infos.size(), damaged,
               latest);
}

void inspect(const Options& options) {
  switch (kind_of(options.path)) {
    case Kind::kFile: {
      const SafetensorsFile file(options.path);
      return inspect_files(options, "safetensors", {&file});
    }
    case Kind::kModel: {
      const HfWeights weights(options.path);
      std::vector<const SafetensorsFile*> files;
      for (const SafetensorsFile& file : weights.files()) files.push_back(&file);
      return inspect_files(options, "model", files);
    }
    case Kind::kCheckpoint:
      return inspect_checkpoint(options, options.path, options.tensors);
    case Kind::kRun:
      return inspect_run(options);
  }
}

TensorProgress progress_on(WorkLine& line) {
  return [&line](int64_t done, int64_t total) { line.set(done, total); };
}

// A model folder has no hashes: its structure is checked, and that every value is a number.
void check_finite(const std::vector<const SafetensorsFile*>& files, const TensorProgress& progress) {
  std::vector<float> values;
  int64_t done = 0, total = 0;
  for (const SafetensorsFile* file : files) total += static_cast<int64_t>(file->entries().size());
  for (const SafetensorsFile* file : files)
    for (const SafetensorsEntry& entry : file->entries()) {
      const int64_t n = entry.shape.elements();
      values.resize(static_cast<size_t>(n));
      copy_tensor(entry, View(values.data(), entry.shape, DType::kF32));
      const auto bad = std::count_if(values.begin(), values.end(), [](float v) { return !std::isfinite(v); });
      if (bad > 0)
        throw Error(ErrorCode::kModel, file->path() + ": tensor " + json_quote(entry.name),
                    fmt::format("{} of {} values are NaN or infinite", bad, n));
      progress(++done, total);
    }
}

std::vector<std::string> foreign_files(const CheckpointReader& reader) {
  std::vector<std::string> notes;
  for (const std::string& name : list_directory(reader.path())) {
    bool listed = !name.ends_with(".safetensors");
    for (size_t i = 0; i < reader.file_count(); ++i) listed |= reader.file_name(i) == name;
    if (!listed) notes.push_back(reader.path() + "/" + name + " is not of this checkpoint and is not read");
  }
  return notes;
}

// Returns what is worth a line though nothing is wrong.
std::vector<std::string> verify_path(const std::string& path, const TensorProgress& progress) {
  switch (kind_of(path)) {
    case Kind::kFile: {
      const SafetensorsFile file(path);
      check_finite({&file}, progress);
      return {};
    }
    case Kind::kModel: {
      const HfWeights weights(path);
      const std::vector<std::string> notes = weights.check(load_model_config(path));
      std::vector<const SafetensorsFile*> files;
      for (const SafetensorsFile& file : weights.files()) files.push_back(&file);
      check_finite(files, progress);
      return notes;
    }
    case Kind::kCheckpoint: {
      const CheckpointReader reader(path);
      check_checkpoint_weights(reader, checkpoint_model(reader));
      reader.verify(progress);
      return foreign_files(reader);
    }
    case Kind::kRun: {
      std::string faults;
      for (const CheckpointInfo& info : list_checkpoints(path)) try {
          if (!info.fault.empty()) throw Error(ErrorCode::kCheckpoint, "", info.fault);
          verify_path(info.path, progress);
        } catch (const Error& e) {
          faults += "\n  " + file_name(info.path) + ": " + e.what();
        }
      if (!faults.empty()) throw Error(ErrorCode::kCheckpoint, path, "holds damaged checkpoints:" + faults);
      return {};
    }
  }
  return {};
}

void verify(const Options& options) {
  const std::vector<std::string> notes = [&] {
    WorkLine line("verifying " + options.path, "tensors");
    return verify_path(options.path, progress_on(line));
  }();
  if (options.json) return print({{"ok", true}, {"path", options.path}, {"notes", notes}});
  for (const std::string& note : notes) fmt::print("note: {}\n", note);
  fmt::print("OK {}\n", options.path);
}

// A checkpoint, or of a run folder its latest.
std::string checkpoint_at(const std::string& path) {
  if (kind_of(path) != Kind::kRun) return path;
  const LatestCheckpoint latest = [&] {
    const WorkLine line("looking for the latest checkpoint of " + path);
    return find_latest(path);
  }();
  for (const std::string& line : latest.skipped) fmt::print(stderr, "skipped {}\n", line);
  if (latest.path.empty()) throw Error(ErrorCode::kCheckpoint, path, "holds no whole checkpoint");
  return latest.path;
}

void reshard_command(const Options& options) {
  const std::string from = checkpoint_at(options.path);
  const CheckpointReader reader(from);
  const std::string path = [&] {
    WorkLine line("resharding " + from, "tensors");
    return reshard_checkpoint(reader, options.output, options.shard_bytes, progress_on(line));
  }();
  const size_t files = CheckpointReader(path).file_count();
  if (options.json) return print({{"checkpoint", path}, {"step", reader.meta().step}, {"files", files}});
  fmt::print("{}: step {}, whole tensors in {} files\n", path, reader.meta().step, files);
}

void export_command(const Options& options) {
  const std::string path = checkpoint_at(options.path);
  const CheckpointReader reader(path);
  HfExport request;
  request.dtype = options.dtype == "bf16" ? DType::kBF16 : DType::kF32;
  request.max_shard_bytes = options.shard_bytes;
  const std::string tokenizer = options.tokenizer.empty() ? reader.meta().tokenizer : options.tokenizer;
  if (!tokenizer.empty()) request.copy_files = files_beside_weights(tokenizer);
  const size_t tokenizer_parts = tokenizer.empty() ? 0 : tokenizer_files(tokenizer).size();
  if (tokenizer_parts == 0) {
    const std::string what =
        tokenizer.empty() ? "the checkpoint names no tokenizer" : "no tokenizer files in " + tokenizer;
    if (!options.tokenizer.empty()) throw Error(ErrorCode::kUsage, "--tokenizer", what);
    fmt::print(stderr, "{}: exported without; --tokenizer DIR adds one\n", what);
  }
  {
    WorkLine line("exporting " + path, "tensors");
    request.progress = progress_on(line);
    export_checkpoint(reader, options.output, request);
  }
  if (options.json)
    print({{"checkpoint", path},
           {"step", reader.meta().step},
           {"output", options.output},
           {"dtype", options.dtype},
           {"tokenizer_files", tokenizer_parts}});
  else
    fmt::print("{}: step {} as {}, {} tokenizer files\n", options.output, reader.meta().step, options.dtype,
               tokenizer_parts);
}

void import_command(const Options& options) {
  const ImportResult result = [&] {
    WorkLine line("importing " + options.path, "tensors");
    return import_hf_folder(options.path, options.output, progress_on(line));
  }();
  if (options.json) return print({{"checkpoint", result.checkpoint}, {"notes", result.notes}});
  for (const std::string& note : result.notes) fmt::print("note: {}\n", note);
  fmt::print("{}: step 0, weights as f32\n", result.checkpoint);
}

}  // namespace

void add_checkpoint_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("checkpoint", "look into, check and convert models and checkpoints");
  command->require_subcommand(1);
  const auto options = std::make_shared<Options>();
  const auto add = [&](const char* name, const char* text, const char* path_name, const char* path_text,
                       void (*run)(const Options&)) {
    CLI::App* sub = command->add_subcommand(name, text);
    sub->add_option(path_name, options->path, path_text)->required();
    sub->add_flag("--json", options->json, "print JSON, one object a line");
    sub->callback([options, run] {
      options->path = follow_latest(options->path);
      run(*options);
    });
    return sub;
  };
  const char* any = "a model folder, a checkpoint, a run folder or a safetensors file";
  CLI::App* sub = add("inspect", "show what is in it", "PATH", any, inspect);
  sub->add_flag("--tensors", options->tensors, "list the tensors");
  add("verify", "check structure, shapes and hashes", "PATH", any, verify);
  sub = add("export", "write a Hugging Face folder", "CHECKPOINT", "a checkpoint, or a run folder for its latest",
            export_command);
  sub->add_option("--output", options->output, "the folder to make")->required()->check(folder_to_write());
  sub->add_option("--dtype", options->dtype, "type of the weights; the router is f32 always")
      ->check(CLI::IsMember({"bf16", "f32"}))
      ->capture_default_str();
  sub->add_option("--shard-bytes", options->shard_bytes, "a weights file holds at most so many bytes, or one tensor")
      ->check(whole_number(1, INT64_MAX))
      ->capture_default_str();
  sub->add_option("--tokenizer", options->tokenizer,
                  "take the tokenizer's files from here instead of where the run had it");
  sub = add("reshard", "write a checkpoint anew: whole tensors, files of another size", "CHECKPOINT",
            "a checkpoint of any layout, or a run folder for its latest", reshard_command);
  sub->add_option("--output", options->output, "the run folder to make")->required()->check(folder_to_write());
  sub->add_option("--shard-bytes", options->shard_bytes, "a file holds at most so many bytes, or one tensor")
      ->check(whole_number(1, INT64_MAX))
      ->capture_default_str();
  sub =
      add("import", "make a run folder with a checkpoint of step 0", "HF_DIR", "a Hugging Face folder", import_command);
  sub->add_option("--output", options->output, "the run folder to make")->required()->check(folder_to_write());
}

}  // namespace concerto
