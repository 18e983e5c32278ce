// Checkpoints of a run: RUNDIR/checkpoint-N/ for step N, and RUNDIR/latest, a text file with the name of the newest.
// Format: docs/checkpoint_format.md.
//
//   manifest.json                          what is here: step, cursor, and of every tensor its name, shape, dtype,
//                                          slice, file, hash, expert id
//   config.json                            the model, as Hugging Face writes it
//   weights-0000I-of-0000N.safetensors     tensors "weight.<HF name>": master weights
//   optimizer-0000I-of-0000N.safetensors   everything else: "moment1.<HF name>", "moment2.<HF name>"
//
// A checkpoint is written as checkpoint-N.concerto.tmp, synced and renamed: a half-written one never has a checkpoint's name.
// Every byte of it is covered by a hash, which loading checks. Tensors have global names and experts global ids,
// whatever the layout of the ranks. A file holds slices of tensors, as their owner had them; what a rank loads may be
// cut in any other way.
//
// Functions that take a `world` are called by all its ranks; null: by the only one there is. They end with the same
// Error on every rank, whichever rank met it.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "concerto/arch/model_spec.h"
#include "concerto/checkpoint/safetensors.h"
#include "concerto/checkpoint/save_plan.h"
#include "concerto/checkpoint/tensor_box.h"
#include "concerto/comm/communicator.h"
#include "concerto/tensor/view.h"

namespace concerto {

// All of a run's state that is not a tensor.
struct CheckpointMeta {
  int64_t step = 0;                  // optimizer steps done
  int64_t samples = 0;               // data cursor: sequences consumed
  std::string config_hash;           // run_config_hash; empty: fits any run (an imported model)
  std::string model_config;          // text of config.json
  std::string tokenizer;             // path of the tokenizer, for export; may be empty
  bool weights_only = false;         // no optimizer state: training starts it from zero
  std::vector<double> loss_history;  // the last losses, oldest first, for spike detection
  std::optional<double> valid_loss;  // of this very step
  double best_valid_loss = std::numeric_limits<double>::infinity();  // of the run so far
  int64_t best_step = -1;
  std::map<std::string, double> counters;  // whatever else must go on after a resume (tokens seen, batches skipped)
};

// A part of a tensor in a file.
struct StoredSlice {
  Box box;
  size_t file = 0;
  uint64_t hash = 0;  // of its bytes
};

struct CheckpointTensor {
  std::string name;
  Shape shape;  // of the whole
  DType dtype = DType::kF32;
  int expert = -1;
  std::vector<StoredSlice> slices;  // in ascending order, together the whole
  int64_t bytes() const { return shape.elements() * dtype_bytes(dtype); }
};

struct SaveOptions {
  int64_t max_shard_bytes = 4'000'000'000;
  std::optional<DType> dtype;  // every tensor is converted to this on its way; none: as the views are
  TensorProgress progress;     // of this rank; may be empty
  Communicator* world = nullptr;
  const ModelConfig* model = nullptr;  // if given, the weights must be this model's, all of them
  SavePlan* plan = nullptr;            // kept by the caller from one save to the next; null: made anew
  // Fetches the values of tensors whose views have no memory; a view is valid until the next call. May be empty.
  std::function<View(const NamedTensor& tensor)> source;
};

// Writes run_dir/checkpoint-<meta.step>, replacing one of the same step, then `latest`; returns its path. Streams: no
// second copy of the tensors is made. If anything fails (full disk, I/O error): Error(kIo), the temporary folder is
// removed, older checkpoints and `latest` are untouched, and the run can go on. If only `latest` cannot be written, the
// new checkpoint is whole and stays; find_latest finds it.
//
// Many ranks: every rank writes the tensors that it owns into files of its own, all at once. Before the first byte is
// written (and once for a plan) rank 0 sees that the owned slices are every tensor that any rank lists, and `model` if
// given, exactly once: else Error(kCheckpoint) that names what is missing and what is twice. After that ranks only tell
// rank 0 how they fared, and hear whether the checkpoint stands; `meta` is rank 0's.
std::string save_checkpoint(const std::string& run_dir, const CheckpointMeta& meta,
                            std::span<const NamedTensor> tensors, const SaveOptions& options = {});

// An open checkpoint: its manifest is read and checked. Its files are opened and compared with the manifest when they
// are first needed. Every fault is Error(kCheckpoint) with the path. For one thread.
class CheckpointReader {
 public:
  explicit CheckpointReader(const std::string& path);
  const std::string& path() const { return path_; }
  int64_t sequence() const { return sequence_; }
  uint64_t manifest_hash() const { return manifest_hash_; }
  const CheckpointMeta& meta() const { return meta_; }
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }
  const CheckpointTensor* find(const std::string& name) const;
  size_t file_count() const { return files_.size(); }
  const std::string& file_name(size_t file) const { return files_[file].name; }
  void check_files() const;  // opens all

  // Copies a tensor into a dense view of its shape (float types convert) and checks its hashes. Error(kCheckpoint)
  // names the tensor.
  void read(const std::string& name, const View& target) const;
  // Copies the part `box` of it into a dense view of the part's shape. Reads no byte outside; checks the hashes of the
  // slices that lie in it whole.
  void read_part(const CheckpointTensor& tensor, const Box& box, const View& target) const;
  void verify_slice(const CheckpointTensor& tensor, const StoredSlice& slice) const;
  // The hash of every slice and the head of every file; of many ranks each does its share of about the same bytes.
  void verify(const TensorProgress& progress = {}, int rank = 0, int ranks = 1) const;
  uint64_t tensor_hash(const CheckpointTensor& tensor) const;  // of all its bytes, however it is cut

 private:
  struct File {
    std::string name;
    int64_t bytes;
    uint64_t header_hash;
    std::vector<std::pair<size_t, size_t>> slices;  // (tensor, slice) that it should hold
    mutable std::unique_ptr<SafetensorsFile> open;
  };
  const SafetensorsFile& open_file(size_t file) const;
  Error damaged(const CheckpointTensor& tensor, const StoredSlice& slice) const;

  std::string path_;
  int64_t sequence_ = 0;
  uint64_t manifest_hash_ = 0;
  CheckpointMeta meta_;
  std::vector<CheckpointTensor> tensors_;
  std::vector<File> files_;
  std::unordered_map<std::string_view, size_t> index_;
};

// Fills every tensor and `meta`. Tensors missing, extra, or of another shape, dtype or expert id are named all at once
// in one Error(kCheckpoint), before anything is written. Hashes are checked as tensors are read: a wrong one is an
// Error(kCheckpoint) too, and leaves the tensors before it filled. From a weights_only checkpoint the other tensors are
// set to zero.
//
// Many ranks: each fills what it lists (`owned` does not matter here) and reads only the bytes of that. A slice whose
// whole no rank reads has its hash checked in a pass of its own, which the ranks share. Extra is what no rank lists.
void load_checkpoint(const std::string& path, CheckpointMeta& meta, std::span<const NamedTensor> tensors,
                     Communicator* world = nullptr);

struct CheckpointInfo {
  std::string path;
  int64_t step = 0;
  int64_t sequence = 0;  // order of saving
  std::optional<double> valid_loss;
  std::string fault;  // empty: its manifest and files are in order
};

// The checkpoints of a run by ascending step, damaged ones with their fault (hashes of tensors are not read). Temporary
// folders are not listed.
std::vector<CheckpointInfo> list_checkpoints(const std::string& run_dir);

struct LatestCheckpoint {
  std::string path;  // empty: none is whole
  int64_t step = -1;
  std::vector<std::string> skipped;  // later ones that are damaged, one line each with the reason
};
// The whole checkpoint that was saved last, every hash verified. (Not simply the one of the highest step: a run may go
// back to an older one.)
LatestCheckpoint find_latest(const std::string& run_dir, Communicator* world = nullptr);

// RUNDIR/latest is a text file with the name of a checkpoint beside it; people pass it as if it were that checkpoint.
// Any other path comes back as it is.
std::string follow_latest(const std::string& path);

// Removes whole checkpoints but the `keep` (>= 1) saved last and, with keep_best, the one of lowest valid_loss; and
// what a crash left half written or half removed. Damaged ones do not count and stay, for a person to look at. Returns
// the removed paths.
std::vector<std::string> remove_old_checkpoints(const std::string& run_dir, int64_t keep, bool keep_best);

std::string checkpoint_path(const std::string& run_dir, int64_t step);
int64_t next_sequence(const std::string& run_dir);  // of the next save

}  // namespace concerto
