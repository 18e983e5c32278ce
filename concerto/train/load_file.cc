#include "concerto/train/load_file.h"

#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>

#include "concerto/base/error.h"
#include "concerto/train/crc.h"

namespace concerto {
namespace {

constexpr std::string_view kMagic = "CNCLOAD1";
constexpr size_t kFrameHead = 8;                   // length, CRC
constexpr uint64_t kDrops = 1, kBias = 2;          // flags of a record
constexpr int64_t kMostCounts = int64_t{1} << 28;  // layers x experts

void put_u32(std::string& out, size_t at, uint32_t v) {
  for (size_t i = 0; i < 4; ++i) out[at + i] = static_cast<char>(v >> (8 * i));
}
uint32_t get_u32(const char* p) {
  uint32_t v = 0;
  for (size_t i = 0; i < 4; ++i) v |= static_cast<uint32_t>(static_cast<uint8_t>(p[i])) << (8 * i);
  return v;
}
void put_varint(std::string& out, int64_t value) {
  auto v = static_cast<uint64_t>(value);
  for (; v >= 0x80; v >>= 7) out.push_back(static_cast<char>(v | 0x80));
  out.push_back(static_cast<char>(v));
}

// Takes numbers off the front of a frame; after anything that does not fit, all are 0 and ok() is false.
class Taker {
 public:
  explicit Taker(std::string_view bytes) : left_(bytes) {}
  bool ok() const { return ok_; }
  bool done() const { return ok_ && left_.empty(); }
  size_t left() const { return left_.size(); }

  int64_t varint() {
    uint64_t v = 0;
    for (int shift = 0; shift < 63 && !left_.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(left_.front());
      left_.remove_prefix(1);
      v |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return static_cast<int64_t>(v);
    }
    return fail();
  }
  float f32() {
    if (left_.size() < 4) return static_cast<float>(fail());
    const float v = std::bit_cast<float>(get_u32(left_.data()));
    left_.remove_prefix(4);
    return v;
  }

 private:
  int64_t fail() {
    ok_ = false;
    left_ = {};
    return 0;
  }
  std::string_view left_;
  bool ok_ = true;
};

}  // namespace

LoadReader::LoadReader(const std::string& path) : in_(path, std::ios::binary) {
  std::error_code failed;
  size_ = static_cast<int64_t>(std::filesystem::file_size(path, failed));
  if (!in_ || failed)
    throw Error(ErrorCode::kIo, path, "cannot be read", "Give the run folder of a Mixture-of-Experts training run.");
  const auto refuse = [&](const char* what) {
    throw Error(ErrorCode::kData, path, what, "Copy it again, or remove it: the run goes on with a new one.");
  };
  std::string magic(kMagic.size(), '\0');
  in_.read(magic.data(), static_cast<std::streamsize>(magic.size()));
  if (!in_ || magic != kMagic) refuse("is no record of expert loads: it does not begin with CNCLOAD1");
  offset_ = static_cast<int64_t>(kMagic.size());
  if (read_frame() != Frame::kWhole) refuse("its head is damaged");
  Taker take(frame_);
  const int64_t layers = take.varint();
  head_.experts = take.varint();
  if (layers < 1 || layers > static_cast<int64_t>(take.left()))
    refuse("the number of layers in its head is impossible");
  if (head_.experts < 1 || head_.experts > kMostCounts / layers)
    refuse("the number of experts in its head is impossible");
  for (int64_t l = 0; l < layers; ++l) head_.layers.push_back(take.varint());
  if (!take.done()) refuse("the layers in its head are damaged");
}

LoadReader::Frame LoadReader::read_frame() {
  const int64_t left = size_ - offset_ - static_cast<int64_t>(kFrameHead);
  if (left < 0) return size_ == offset_ ? Frame::kEnd : Frame::kTorn;
  char head[kFrameHead];
  if (!in_.read(head, kFrameHead)) return Frame::kTorn;
  const int64_t length = get_u32(head);
  if (length > left) return Frame::kTorn;
  frame_.resize(static_cast<size_t>(length));
  if (!in_.read(frame_.data(), length)) return Frame::kTorn;
  if (crc32c(frame_) != get_u32(head + 4)) return Frame::kBroken;
  offset_ += static_cast<int64_t>(kFrameHead) + length;
  return Frame::kWhole;
}

bool LoadReader::parse(LoadRecord& r) {
  Taker take(frame_);
  r.step = take.varint();
  const auto flags = static_cast<uint64_t>(take.varint());
  r.has_drops = (flags & kDrops) != 0;
  r.has_bias = (flags & kBias) != 0;
  const size_t layers = head_.layers.size(), counts = layers * static_cast<size_t>(head_.experts);
  if (!take.ok() || r.step <= last_step_ || flags > (kDrops | kBias)) return false;
  if (take.left() < counts * (r.has_drops ? 2 : 1) + (r.has_bias ? 8 * layers : 0)) return false;
  r.tokens.resize(counts);
  r.dropped.resize(r.has_drops ? counts : 0);
  r.bias.resize(r.has_bias ? 2 * layers : 0);
  constexpr int64_t kMost = int64_t{1} << 32;  // sums over many steps must not overflow
  for (int64_t& n : r.tokens)
    if ((n = take.varint()) > kMost) return false;
  for (size_t i = 0; i < r.dropped.size(); ++i)
    if ((r.dropped[i] = take.varint()) > r.tokens[i]) return false;
  for (float& b : r.bias) b = take.f32();
  return take.done();
}

bool LoadReader::next(LoadRecord& record) {
  if (ended_) return false;
  const int64_t start = offset_;
  const Frame frame = read_frame();
  if (frame == Frame::kWhole && parse(record)) {
    last_step_ = record.step;
    return true;
  }
  ended_ = true;
  damaged_ = frame == Frame::kWhole || frame == Frame::kBroken;
  offset_ = start;
  return false;
}

namespace {

// Cuts the file behind the last record to keep; 0 where not even the head is kept.
int64_t cut_after(const std::string& path, const LoadHead& head, int64_t resume_step, const Warn& warn) {
  if (!std::filesystem::exists(path)) return 0;
  int64_t keep = 0;
  const auto lost = [&](int64_t last, const char* why) {
    if (warn)
      warn(fmt::format("{}: {}; the expert loads of steps {} to {} are lost", path, why, last + 1, resume_step));
  };
  if (resume_step > 0) {
    try {
      LoadReader reader(path);
      if (reader.head() == head) {
        LoadRecord record{};
        int64_t last = 0;
        keep = reader.offset();
        while (reader.next(record) && record.step <= resume_step) {
          keep = reader.offset();
          last = record.step;
        }
        if (record.step <= resume_step && reader.left() > 0 && last < resume_step) lost(last, "damaged");
      } else {
        lost(0, "of a model with other layers or experts");
      }
    } catch (const Error& e) {
      if (e.code != ErrorCode::kData) throw;
      lost(0, e.problem.c_str());
    }
  }
  std::error_code failed;
  std::filesystem::resize_file(path, static_cast<uintmax_t>(keep), failed);
  if (failed)
    throw Error(ErrorCode::kIo, path, "cannot be cut: " + failed.message(), "Check its rights, and the disk.");
  return keep;
}

}  // namespace

LoadWriter::LoadWriter(const std::string& path, LoadHead head, int64_t resume_step, Warn warn)
    : head_(std::move(head)), has_head_(cut_after(path, head_, resume_step, warn) > 0), file_(path, warn) {
  CHECK(!head_.layers.empty() && head_.experts > 0, "a dense model has no expert loads");
  if (!has_head_) write_head();
}

void LoadWriter::finish_frame() {
  const std::string_view body = std::string_view(frame_).substr(kFrameHead);
  CHECK(body.size() <= std::numeric_limits<uint32_t>::max());
  put_u32(frame_, 0, static_cast<uint32_t>(body.size()));
  put_u32(frame_, 4, crc32c(body));
}

void LoadWriter::write_head() {
  frame_.assign(kFrameHead, '\0');
  put_varint(frame_, static_cast<int64_t>(head_.layers.size()));
  put_varint(frame_, head_.experts);
  for (const int64_t layer : head_.layers) put_varint(frame_, layer);
  finish_frame();
  has_head_ = file_.append(std::string(kMagic) + frame_);
}

void LoadWriter::write(const StepReport& r) {
  const size_t layers = head_.layers.size(), experts = static_cast<size_t>(head_.experts);
  CHECK(r.moe_layers == head_.layers && r.tokens_per_expert[0].size() == experts && r.layer_loads.size() == layers);
  if (!has_head_) write_head();
  if (!has_head_) return;          // the disk is full; the next step tries again
  constexpr size_t kLongest = 10;  // bytes of a varint
  frame_.reserve(kFrameHead + 2 * kLongest + layers * (2 * experts * kLongest + 8));
  frame_.assign(kFrameHead, '\0');
  const bool drops = !r.dropped_per_expert.empty(), bias = !r.correction_bias.empty();
  put_varint(frame_, r.step);
  put_varint(frame_, static_cast<int64_t>((drops ? kDrops : 0) | (bias ? kBias : 0)));
  for (const auto* counts : {&r.tokens_per_expert, &r.dropped_per_expert})
    for (const std::vector<int64_t>& layer : *counts)
      for (const int64_t n : layer) put_varint(frame_, n);
  if (bias) {
    for (const LayerLoad& load : r.layer_loads) {
      for (const double b : {load.bias_min, load.bias_max}) {
        frame_.append(4, '\0');
        put_u32(frame_, frame_.size() - 4, std::bit_cast<uint32_t>(static_cast<float>(b)));
      }
    }
  }
  finish_frame();
  file_.append(frame_);
}

}  // namespace concerto
