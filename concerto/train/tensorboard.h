// TensorBoard event files, written by hand: TFRecord frames (length, masked CRC-32C, payload, masked CRC-32C) around
// Event protobufs (tensorflow/core/util/event.proto). No protobuf or TensorFlow is needed to write or to test them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "concerto/train/crc.h"
#include "concerto/train/load_picture.h"
#include "concerto/train/metrics.h"

namespace concerto {

uint32_t masked_crc32c(std::string_view bytes);  // as TFRecord stores it: rotated by 15 and shifted by a constant

// Writes RUNDIR/events.out.tfevents.<time>.<host>.<pid>. A training step gives the scalars train/loss,
// train/total_loss, train/aux_loss, train/z_loss, train/orthogonal_loss, train/mtp_loss_<i>, train/lr, train/grad_norm, train/tokens_per_s, expert_load/max
// expert_load/layer_<i> (max over mean), expert_idle/layer_<i>, expert_entropy/layer_<i>, expert_dropped/layer_<i> (if
// routers drop) and expert_bias_min/layer_<i>, expert_bias_max/layer_<i> (if routers have one); every
// kHistogramSteps-th step the histograms expert_tokens/layer_<i>, in which bucket e is expert e's tokens; every
// kImageSteps-th step and after the last the image expert_load/heat_map, layers by experts over the steps since the
// image before (of this process). An evaluation gives valid/loss.
class EventWriter {
 public:
  static constexpr int64_t kHistogramSteps = 10, kImageSteps = 50;

  // Tells TensorBoard to forget what earlier files of this folder say about steps after resume_step. Error(kIo) if
  // no file can be made.
  EventWriter(const std::string& run_dir, int64_t resume_step, Warn warn = warn_on_stderr);
  void write(const StepReport& report);
  void write(const EvalReport& report);
  const std::string& path() const { return file_->path(); }

 private:
  void scalar(std::string_view tag, double value);
  void histogram(std::string_view tag, const std::vector<int64_t>& tokens_per_expert);
  void image(std::string_view tag, const Canvas& canvas);
  void load_scalars(const StepReport& report);
  void heat_map(const StepReport& report);
  void prepare(const StepReport& report);
  void append_event(int64_t step, uint32_t field, std::string_view payload);

  bool others_ = false;  // files of earlier runs in this folder
  std::unique_ptr<RecordFile> file_;
  std::vector<int64_t> layers_;  // those that the tags below name
  struct LayerTags {
    std::string load, idle, entropy, dropped, bias_min, bias_max, tokens;
  };
  std::vector<LayerTags> tags_;
  std::vector<std::string> mtp_tags_;
  std::unique_ptr<LoadHeatMap> map_;
  std::vector<std::vector<int64_t>> map_tokens_;  // [MoE layers][experts] since the last image
  // Kept for their capacity: a steady step allocates nothing.
  std::string summary_, value_, histogram_, png_, image_, event_, record_;
};

}  // namespace concerto
