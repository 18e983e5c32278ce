#include "concerto/train/tensorboard.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <string_view>

#include "concerto/base/error.h"

namespace concerto {
namespace {

constexpr std::string_view kPrefix = "events.out.tfevents.";

// Fields of tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
namespace event {
constexpr uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
}
namespace value {
constexpr uint32_t kTag = 1, kSimpleValue = 2, kImage = 4, kHistogram = 5;
}
namespace picture {  // Summary.Image
constexpr uint32_t kHeight = 1, kWidth = 2, kColorSpace = 3, kEncoded = 4;
constexpr uint64_t kRgb = 3;
}  // namespace picture
namespace histo {
constexpr uint32_t kMin = 1, kMax = 2, kCount = 3, kSum = 4, kSumSquares = 5, kBucketLimit = 6, kBucket = 7;
}
constexpr uint32_t kSummaryValue = 1;
constexpr std::string_view kSessionStart = "\x08\x01";  // SessionLog {status: START}

enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_varint(std::string& out, uint64_t v) {
  for (; v >= 0x80; v >>= 7) out.push_back(static_cast<char>(v | 0x80));
  out.push_back(static_cast<char>(v));
}
void put_key(std::string& out, uint32_t field, Wire wire) { put_varint(out, field << 3 | wire); }

template <class U>
void put_little_endian(std::string& out, U bits) {
  for (size_t i = 0; i < sizeof(U); ++i) out.push_back(static_cast<char>(bits >> (8 * i)));
}
void put_double(std::string& out, uint32_t field, double v) {
  put_key(out, field, kFixed64);
  put_little_endian(out, std::bit_cast<uint64_t>(v));
}
void put_float(std::string& out, uint32_t field, float v) {
  put_key(out, field, kFixed32);
  put_little_endian(out, std::bit_cast<uint32_t>(v));
}
void put_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  put_key(out, field, kBytes);
  put_varint(out, bytes.size());
  out.append(bytes);
}

constexpr size_t kLongestHead = 48;  // wall time, the longest step, a length, the frame

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// TensorBoard reads the files of a folder in the order of their names: ours must sort after those that are there.
std::string new_file_name(const std::string& run_dir, bool& others) {
  int64_t seconds = static_cast<int64_t>(wall_time());
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(run_dir, ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(kPrefix)) continue;
    others = true;
    int64_t earlier = 0;
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), earlier);
    if (earlier < 9999999999) seconds = std::max(seconds, earlier + 1);
  }
  char host[256] = "localhost";
  if (::gethostname(host, sizeof(host)) != 0) std::copy_n("localhost", 10, host);
  host[sizeof(host) - 1] = '\0';
  return fmt::format("{}/{}{:010}.{}.{}", run_dir, kPrefix, seconds, host, ::getpid());
}

}  // namespace

uint32_t masked_crc32c(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8u; }

EventWriter::EventWriter(const std::string& run_dir, int64_t resume_step, Warn warn)
    : file_(std::make_unique<RecordFile>(new_file_name(run_dir, others_), std::move(warn))) {
  append_event(0, event::kFileVersion, "brain.Event:2");
  if (resume_step > 0 || others_) append_event(resume_step + 1, event::kSessionLog, kSessionStart);
}

void EventWriter::append_event(int64_t step, uint32_t field, std::string_view payload) {
  event_.reserve(payload.size() + kLongestHead);
  record_.reserve(payload.size() + 2 * kLongestHead);
  event_.clear();
  put_double(event_, event::kWallTime, wall_time());
  if (step != 0) {
    put_key(event_, event::kStep, kVarint);
    put_varint(event_, static_cast<uint64_t>(step));
  }
  put_bytes(event_, field, payload);
  record_.clear();
  put_little_endian(record_, static_cast<uint64_t>(event_.size()));
  put_little_endian(record_, masked_crc32c(record_));
  record_.append(event_);
  put_little_endian(record_, masked_crc32c(event_));
  file_->append(record_);
}

void EventWriter::scalar(std::string_view tag, double v) {
  value_.clear();
  put_bytes(value_, value::kTag, tag);
  put_float(value_, value::kSimpleValue, static_cast<float>(v));
  put_bytes(summary_, kSummaryValue, value_);
}

void EventWriter::histogram(std::string_view tag, const std::vector<int64_t>& tokens_per_expert) {
  const double experts = static_cast<double>(tokens_per_expert.size());
  double tokens = 0, sum = 0, squares = 0;
  for (size_t e = 0; e < tokens_per_expert.size(); ++e) {
    const double n = static_cast<double>(tokens_per_expert[e]), id = static_cast<double>(e);
    tokens += n;
    sum += n * id;
    squares += n * id * id;
  }
  histogram_.clear();
  put_double(histogram_, histo::kMin, -0.5);
  put_double(histogram_, histo::kMax, experts - 0.5);
  put_double(histogram_, histo::kCount, tokens);
  put_double(histogram_, histo::kSum, sum);
  put_double(histogram_, histo::kSumSquares, squares);
  put_key(histogram_, histo::kBucketLimit, kBytes);
  put_varint(histogram_, tokens_per_expert.size() * sizeof(double));
  for (size_t e = 0; e < tokens_per_expert.size(); ++e)
    put_little_endian(histogram_, std::bit_cast<uint64_t>(static_cast<double>(e) + 0.5));
  put_key(histogram_, histo::kBucket, kBytes);
  put_varint(histogram_, tokens_per_expert.size() * sizeof(double));
  for (const int64_t n : tokens_per_expert)
    put_little_endian(histogram_, std::bit_cast<uint64_t>(static_cast<double>(n)));
  value_.clear();
  put_bytes(value_, value::kTag, tag);
  put_bytes(value_, value::kHistogram, histogram_);
  put_bytes(summary_, kSummaryValue, value_);
}

void EventWriter::image(std::string_view tag, const Canvas& canvas) {
  canvas.encode(png_);
  const auto number = [&](uint32_t field, int64_t v) {
    put_key(image_, field, kVarint);
    put_varint(image_, static_cast<uint64_t>(v));
  };
  image_.clear();
  number(picture::kHeight, canvas.height());
  number(picture::kWidth, canvas.width());
  number(picture::kColorSpace, picture::kRgb);
  put_bytes(image_, picture::kEncoded, png_);
  value_.clear();
  put_bytes(value_, value::kTag, tag);
  put_bytes(value_, value::kImage, image_);
  put_bytes(summary_, kSummaryValue, value_);
}

// Names and room for the longest record at once: the first histogram and image come many steps later, and a steady step
// allocates nothing.
void EventWriter::prepare(const StepReport& report) {
  constexpr size_t kValue = 128;  // more than the tag, keys, lengths and single numbers of a value
  size_t experts = 0, picture = 0;
  if (report.moe_layers != layers_) {
    layers_ = report.moe_layers;
    tags_.clear();
    map_.reset();
    for (const int64_t i : layers_) {
      const auto tag = [i](const char* name) { return fmt::format("{}/layer_{}", name, i); };
      tags_.push_back({.load = tag("expert_load"),
                       .idle = tag("expert_idle"),
                       .entropy = tag("expert_entropy"),
                       .dropped = tag("expert_dropped"),
                       .bias_min = tag("expert_bias_min"),
                       .bias_max = tag("expert_bias_max"),
                       .tokens = tag("expert_tokens")});
    }
  }
  if (!layers_.empty()) {
    experts = report.tokens_per_expert[0].size();
    if (!map_) {
      map_ = std::make_unique<LoadHeatMap>(layers_, static_cast<int64_t>(experts));
      map_tokens_.assign(layers_.size(), std::vector<int64_t>(experts, 0));
    }
    picture = static_cast<size_t>(png_bound(map_->canvas().width(), map_->canvas().height()));
  }
  while (mtp_tags_.size() < report.mtp_losses.size())
    mtp_tags_.push_back(fmt::format("train/mtp_loss_{}", mtp_tags_.size()));
  const size_t histogram = kValue + 2 * sizeof(double) * experts, scalars = 10 + mtp_tags_.size() + 6 * layers_.size();
  histogram_.reserve(histogram);
  png_.reserve(picture);
  image_.reserve(picture + kValue);
  value_.reserve(picture + 2 * kValue + histogram);
  summary_.reserve(picture + (scalars + 2) * kValue + layers_.size() * (2 * kValue + histogram));
  event_.reserve(summary_.capacity() + kLongestHead);
  record_.reserve(summary_.capacity() + 2 * kLongestHead);
}

void EventWriter::load_scalars(const StepReport& r) {
  scalar("train/aux_loss", r.aux_loss);
  scalar("expert_load/max", r.expert_max_over_mean);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const LayerLoad& load = r.layer_loads[i];
    const LayerTags& tags = tags_[i];
    scalar(tags.load, load.max_over_mean);
    scalar(tags.idle, load.idle_share);
    scalar(tags.entropy, load.entropy);
    if (load.has_drops) scalar(tags.dropped, load.dropped_share());
    if (load.has_bias) {
      scalar(tags.bias_min, load.bias_min);
      scalar(tags.bias_max, load.bias_max);
    }
    if (r.step % kHistogramSteps == 0) histogram(tags.tokens, r.tokens_per_expert[i]);
  }
}

void EventWriter::heat_map(const StepReport& r) {
  for (size_t i = 0; i < layers_.size(); ++i)
    for (size_t e = 0; e < map_tokens_[i].size(); ++e) map_tokens_[i][e] += r.tokens_per_expert[i][e];
  if (r.step % kImageSteps != 0 && r.step != r.steps) return;
  map_->draw(map_tokens_);
  image("expert_load/heat_map", map_->canvas());
  for (auto& layer : map_tokens_) std::fill(layer.begin(), layer.end(), 0);
}

void EventWriter::write(const StepReport& r) {
  CHECK(r.moe_layers.size() == r.layer_loads.size(), "{} layers, {} loads", r.moe_layers.size(), r.layer_loads.size());
  prepare(r);
  summary_.clear();
  scalar("train/loss", r.loss);
  scalar("train/total_loss", r.total_loss);
  scalar("train/lr", r.lr);
  scalar("train/grad_norm", r.grad_norm);
  scalar("train/tokens_per_s", r.tokens_per_s);
  for (size_t i = 0; i < r.mtp_losses.size(); ++i) scalar(mtp_tags_[i], r.mtp_losses[i]);
  if (!layers_.empty()) {
    if (r.z_loss != 0) scalar("train/z_loss", r.z_loss);
    if (r.orthogonal_loss != 0) scalar("train/orthogonal_loss", r.orthogonal_loss);
    load_scalars(r);
    heat_map(r);
  }
  append_event(r.step, event::kSummary, summary_);
}

void EventWriter::write(const EvalReport& r) {
  summary_.clear();
  scalar("valid/loss", r.valid_loss);
  append_event(r.step, event::kSummary, summary_);
}

}  // namespace concerto
