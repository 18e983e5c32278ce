// RUNDIR/expert_load.bin: how many tokens each expert was chosen by in every step, and what `concerto inspect load`
// reads. Append-only; docs/expert_load.md has the format.
//
// All numbers little-endian. Head: the magic "CNCLOAD1", u32 bytes of what follows, u32 its CRC-32C; in it varints
// (LEB128): MoE layers L, experts E, then the number of each layer. Record: u32 bytes of what follows, u32 its CRC-32C;
// in it varints: step, flags; then L x E choices; with kDrops L x E drops; with kBias L pairs of f32 (lowest, highest).
// Steps ascend; a step may be missing (a full disk), none is there twice.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "concerto/train/metrics.h"

namespace concerto {

inline constexpr const char* kLoadFileName = "expert_load.bin";

struct LoadHead {
  std::vector<int64_t> layers;  // numbers of the MoE layers
  int64_t experts = 0;
  bool operator==(const LoadHead&) const = default;
};

struct LoadRecord {
  int64_t step = 0;
  bool has_drops = false, has_bias = false;
  std::vector<int64_t> tokens, dropped;  // [L x E] before drops, of them dropped (without drops: empty)
  std::vector<float> bias;               // [L x 2] lowest and highest; empty without
};

// Reads a file from its start. A file that somebody is writing is fine: a last record that is not whole yet ends it.
class LoadReader {
 public:
  // Error(kIo) if it cannot be opened, Error(kData) if its head is damaged. Memory taken is at most some times the
  // file's size, whatever its lengths say.
  explicit LoadReader(const std::string& path);

  const LoadHead& head() const { return head_; }
  // False at the end, or at the first record that is torn, damaged or out of order.
  bool next(LoadRecord& record);
  bool damaged() const { return damaged_; }   // it did not end as a file does that grows or was cut off
  int64_t offset() const { return offset_; }  // bytes of the head and all whole records so far
  int64_t left() const { return size_ - offset_; }

 private:
  enum class Frame { kEnd, kTorn, kBroken, kWhole };
  Frame read_frame();  // the next one into frame_
  bool parse(LoadRecord& record);

  std::ifstream in_;
  int64_t size_ = 0, offset_ = 0;
  LoadHead head_;
  int64_t last_step_ = 0;
  bool ended_ = false, damaged_ = false;
  std::string frame_;
};

class LoadWriter {
 public:
  // Continues after step `resume_step`: what comes later is cut off, and so is a damaged end (with a warning). 0 starts
  // anew, as does (with a warning) a file of other layers or experts. Error(kIo).
  LoadWriter(const std::string& path, LoadHead head, int64_t resume_step, Warn warn = warn_on_stderr);
  void write(const StepReport& report);  // allocates nothing after the first call
  void sync() { file_.sync(); }          // as MetricsWriter::sync

 private:
  void write_head();
  void finish_frame();

  LoadHead head_;
  std::string frame_;
  bool has_head_;  // the file
  RecordFile file_;
};

}  // namespace concerto
