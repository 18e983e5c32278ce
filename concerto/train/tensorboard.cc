#include "concerto/train/tensorboard.h"

#include <unistd.h>

#include <algorithm>
#include <array>
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

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}
constexpr auto kCrcTable = make_crc_table();

// Fields of tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
namespace event {
constexpr uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
}
namespace value {
constexpr uint32_t kTag = 1, kSimpleValue = 2, kHistogram = 5;
}
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
std::string new_file_name(const std::string& run_dir) {
  int64_t seconds = static_cast<int64_t>(wall_time());
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(run_dir, ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(kPrefix)) continue;
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

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = kCrcTable[(crc ^ static_cast<uint8_t>(c)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

uint32_t masked_crc32c(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8u; }

EventWriter::EventWriter(const std::string& run_dir, int64_t resume_step, Warn warn)
    : file_(std::make_unique<RecordFile>(new_file_name(run_dir), std::move(warn))) {
  append_event(0, event::kFileVersion, "brain.Event:2");
  if (resume_step > 0) append_event(resume_step + 1, event::kSessionLog, kSessionStart);
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

void EventWriter::name_layers(const StepReport& report) {
  if (report.moe_layers != layers_) {
    layers_ = report.moe_layers;
    load_tags_.clear();
    token_tags_.clear();
    for (const int64_t layer : layers_) {
      load_tags_.push_back(fmt::format("expert_load/layer_{}", layer));
      token_tags_.push_back(fmt::format("expert_tokens/layer_{}", layer));
    }
  }
  while (mtp_tags_.size() < report.mtp_losses.size())
    mtp_tags_.push_back(fmt::format("train/mtp_loss_{}", mtp_tags_.size()));
  // Room for the longest record at once: the first histogram comes many steps later, and a steady step allocates
  // nothing.
  constexpr size_t kValue = 128;  // more than the tag, keys, lengths and single numbers of a value
  const size_t experts = report.tokens_per_expert.empty() ? 0 : report.tokens_per_expert[0].size();
  const size_t histogram = kValue + 2 * sizeof(double) * experts, scalars = 8 + mtp_tags_.size() + layers_.size();
  histogram_.reserve(histogram);
  value_.reserve(kValue + histogram);
  summary_.reserve(scalars * kValue + layers_.size() * (2 * kValue + histogram));
  event_.reserve(summary_.capacity() + kLongestHead);
  record_.reserve(summary_.capacity() + 2 * kLongestHead);
}

void EventWriter::write(const StepReport& r) {
  CHECK(r.moe_layers.size() == r.tokens_per_expert.size(), "{} layers, {} counts", r.moe_layers.size(),
        r.tokens_per_expert.size());
  name_layers(r);
  summary_.clear();
  scalar("train/loss", r.loss);
  scalar("train/total_loss", r.total_loss);
  scalar("train/lr", r.lr);
  scalar("train/grad_norm", r.grad_norm);
  scalar("train/tokens_per_s", r.tokens_per_s);
  for (size_t i = 0; i < r.mtp_losses.size(); ++i) scalar(mtp_tags_[i], r.mtp_losses[i]);
  if (!layers_.empty()) {
    scalar("train/aux_loss", r.aux_loss);
    if (r.z_loss != 0) scalar("train/z_loss", r.z_loss);
    if (r.orthogonal_loss != 0) scalar("train/orthogonal_loss", r.orthogonal_loss);
    scalar("expert_load/max", r.expert_max_over_mean);
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    scalar(load_tags_[i], max_over_mean(r.tokens_per_expert[i]));
    if (r.step % kHistogramSteps == 0) histogram(token_tags_[i], r.tokens_per_expert[i]);
  }
  append_event(r.step, event::kSummary, summary_);
}

void EventWriter::write(const EvalReport& r) {
  summary_.clear();
  scalar("valid/loss", r.valid_loss);
  append_event(r.step, event::kSummary, summary_);
}

}  // namespace concerto
