#include "tests/support/tiny_training.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "concerto/data/indexed_dataset.h"
#include "concerto/train/signals.h"

namespace concerto::test {
namespace fs = std::filesystem;

constexpr int64_t kVocabulary = 40;

static std::vector<int32_t> document(const Rng& rng, uint64_t& at, double noise) {
  std::vector<int32_t> ids = {1 + static_cast<int32_t>(rng.below(at++, kVocabulary - 1))};
  while (static_cast<int64_t>(ids.size()) < kDocumentTokens)
    ids.push_back(rng.uniform(at++) < noise ? 1 + static_cast<int32_t>(rng.below(at++, kVocabulary - 1))
                                            : (ids.back() * 7) % 37 + 1);
  return ids;
}

std::string Workplace::write_data(const std::string& name, int documents, uint64_t seed, double noise) const {
  const Rng rng(seed, "documents");
  uint64_t at = 0;
  IndexedDatasetWriter writer(*this / name, kVocabulary, false);
  for (int i = 0; i < documents; ++i) writer.add_document(document(rng, at, noise));
  writer.finish();
  return *this / name;
}

std::string Workplace::write_data_with_odd_documents(const std::string& name, int documents, int begin, int end) const {
  const Rng rng(1, "documents");
  uint64_t at = 0;
  IndexedDatasetWriter writer(*this / name, kVocabulary, false);
  for (int i = 0; i < documents; ++i) {
    std::vector<int32_t> ids(kDocumentTokens - 1, 5);
    if (i >= begin && i < end) ids = document(rng, at, 1.0);
    ids.resize(kDocumentTokens - 1);
    writer.add_document(ids);
  }
  writer.finish();
  return *this / name;
}

void Workplace::copy_killed_run(const std::string& from, const std::string& to, int64_t step) const {
  fs::create_directories(*this / to);
  for (const char* file : {"config.yaml", "metrics.jsonl", "expert_load.bin"})
    fs::copy_file(*this / from + "/" + file, *this / to + "/" + file);
  for (const CheckpointInfo& c : list_checkpoints(*this / from))
    if (c.step <= step) fs::copy(c.path, checkpoint_path(*this / to, c.step), fs::copy_options::recursive);
}

FileSizeLimit::FileSizeLimit(rlim_t bytes) {
  ::getrlimit(RLIMIT_FSIZE, &before_);
  handler_ = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit now{bytes, before_.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &now);
}

FileSizeLimit::~FileSizeLimit() {
  ::setrlimit(RLIMIT_FSIZE, &before_);
  ::signal(SIGXFSZ, handler_);
}

RunConfig tiny_run_config(const Workplace& work, const std::string& dir) {
  RunConfig c;
  c.run.dir = work / dir;
  c.run.threads = 1;
  c.model.config = tiny_moe();
  c.model.config.num_nextn_predict_layers = 1;
  c.data.train = {{work / "train", 1.0}};
  c.data.valid = {{work / "valid", 1.0}};
  c.training.steps = 12;
  c.training.global_batch_size = 4;
  c.training.micro_batch_size = 2;
  c.training.seq_length = 32;
  c.training.dtype = "f32";
  c.training.eval_every_steps = 6;
  c.optimizer.lr = 0.01;
  c.optimizer.warmup_steps = 2;
  c.checkpoint.every_steps = 3;
  c.checkpoint.keep = 100;
  c.monitor.log_every_steps = 1000;
  return c;
}

RunSummary train(const RunConfig& config, int threads) {
  const StopSignals signals;
  ThreadPool pool(threads);
  Trainer trainer(config, backend_by_name(config.backend), pool, {});
  return trainer.run();
}

static std::vector<nlohmann::json> rows(const std::string& run_dir) {
  std::vector<nlohmann::json> all;
  std::ifstream in(run_dir + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);) all.push_back(nlohmann::json::parse(line));
  return all;
}

std::vector<std::string> metrics_rows(const std::string& run_dir) {
  std::vector<std::string> lines;
  for (nlohmann::json& row : rows(run_dir)) {
    for (const char* of_the_machine : {"tokens_per_s", "seconds", "peak_bytes"}) row.erase(of_the_machine);
    lines.push_back(row.dump());
  }
  return lines;
}

std::vector<double> metrics_values(const std::string& run_dir, const std::string& field) {
  std::vector<double> values;
  for (const nlohmann::json& row : rows(run_dir))
    if (row.contains(field)) values.push_back(row[field].is_number() ? row[field].get<double>() : NAN);
  return values;
}

std::vector<std::string> checkpoint_contents(const std::string& path) {
  std::vector<std::string> lines;
  const CheckpointReader reader(path);
  reader.verify();
  for (const CheckpointTensor& t : reader.tensors())
    lines.push_back(fmt::format("{} {:016x}", t.name, reader.tensor_hash(t)));
  std::sort(lines.begin(), lines.end());
  return lines;
}

}  // namespace concerto::test
