// TensorBoard event files, written by hand: TFRecord frames (length, masked CRC-32C, payload, masked CRC-32C) around
// Event protobufs (tensorflow/core/util/event.proto). No protobuf or TensorFlow is needed to write or to test them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "concerto/train/metrics.h"

namespace concerto {

uint32_t crc32c(std::string_view bytes);         // Castagnoli
uint32_t masked_crc32c(std::string_view bytes);  // as TFRecord stores it: rotated by 15 and shifted by a constant

// Writes RUNDIR/events.out.tfevents.<time>.<host>.<pid>. A training step gives the scalars train/loss,
// train/total_loss, train/aux_loss, train/z_loss, train/orthogonal_loss, train/mtp_loss_<i>, train/lr, train/grad_norm,
// train/tokens_per_s, expert_load/max and expert_load/layer_<i> (max over mean), and every kHistogramSteps-th step the
// histograms expert_tokens/layer_<i>, in which bucket e is expert e's tokens. An evaluation gives valid/loss.
class EventWriter {
 public:
  static constexpr int64_t kHistogramSteps = 10;

  // resume_step > 0 tells TensorBoard to forget what earlier files of this folder say about later steps. Error(kIo) if
  // no file can be made.
  EventWriter(const std::string& run_dir, int64_t resume_step, Warn warn = warn_on_stderr);
  void write(const StepReport& report);
  void write(const EvalReport& report);
  const std::string& path() const { return file_->path(); }

 private:
  void scalar(std::string_view tag, double value);
  void histogram(std::string_view tag, const std::vector<int64_t>& tokens_per_expert);
  void name_layers(const StepReport& report);
  void append_event(int64_t step, uint32_t field, std::string_view payload);

  std::unique_ptr<RecordFile> file_;
  std::vector<int64_t> layers_;  // those that the tags below name
  std::vector<std::string> load_tags_, token_tags_, mtp_tags_;
  std::string summary_, value_, histogram_, event_,
      record_;  // kept for their capacity: a steady step allocates nothing
};

}  // namespace concerto
