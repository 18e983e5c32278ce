#include "concerto/train/tensorboard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <map>
#include <optional>

#include "concerto/base/error.h"
#include "concerto/base/test_folder.h"
#include "concerto/train/test_png.h"

namespace concerto {
namespace {

// A reader written against the formats' descriptions, sharing nothing with the writer but crc32c().
struct Field {
  uint64_t number;
  std::string_view bytes;  // wire types 1, 2, 5
  uint64_t varint = 0;     // wire type 0

  double as_double() const {
    double v = 0;
    EXPECT_EQ(bytes.size(), sizeof(v));
    std::memcpy(&v, bytes.data(), sizeof(v));
    return v;
  }
  float as_float() const {
    float v = 0;
    EXPECT_EQ(bytes.size(), sizeof(v));
    std::memcpy(&v, bytes.data(), sizeof(v));
    return v;
  }
};

uint64_t take_varint(std::string_view& in) {
  uint64_t v = 0;
  for (int shift = 0; !in.empty() && shift < 64; shift += 7) {
    const auto byte = static_cast<uint8_t>(in.front());
    in.remove_prefix(1);
    v |= uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return v;
  }
  ADD_FAILURE() << "bad varint";
  return 0;
}

std::vector<Field> fields_of(std::string_view in) {
  std::vector<Field> fields;
  while (!in.empty()) {
    const uint64_t key = take_varint(in);
    Field f{key >> 3, {}};
    size_t size = 0;
    switch (key & 7) {
      case 0:
        f.varint = take_varint(in);
        break;
      case 1:
        size = 8;
        break;
      case 2:
        size = take_varint(in);
        break;
      case 5:
        size = 4;
        break;
      default:
        ADD_FAILURE() << "wire type " << (key & 7);
        return fields;
    }
    if (size > in.size()) {
      ADD_FAILURE() << "field of " << size << " bytes, " << in.size() << " left";
      return fields;
    }
    f.bytes = in.substr(0, size);
    in.remove_prefix(size);
    fields.push_back(f);
  }
  return fields;
}

struct Histogram {
  double min = 0, max = 0, num = 0;
  std::vector<double> limits, counts;
};
struct Image {
  int64_t height = 0, width = 0, color_space = 0;
  std::string png;
};
struct DecodedEvent {
  double wall_time = 0;
  int64_t step = 0;
  std::string file_version;
  std::optional<uint64_t> session_status;
  std::map<std::string, float> scalars;
  std::map<std::string, Histogram> histograms;
  std::map<std::string, Image> images;
};

std::vector<double> doubles(std::string_view packed) {
  std::vector<double> v(packed.size() / 8);
  std::memcpy(v.data(), packed.data(), v.size() * 8);
  return v;
}

DecodedEvent decode_event(std::string_view payload) {
  DecodedEvent e;
  for (const Field& f : fields_of(payload)) {
    if (f.number == 1) e.wall_time = f.as_double();
    if (f.number == 2) e.step = static_cast<int64_t>(f.varint);
    if (f.number == 3) e.file_version = f.bytes;
    if (f.number == 7) e.session_status = fields_of(f.bytes).at(0).varint;
    if (f.number != 5) continue;
    for (const Field& value : fields_of(f.bytes)) {
      EXPECT_EQ(value.number, 1u);
      std::string tag;
      for (const Field& v : fields_of(value.bytes)) {
        if (v.number == 1) tag = v.bytes;
        if (v.number == 2) e.scalars[tag] = v.as_float();
        if (v.number == 4) {
          Image& image = e.images[tag];
          for (const Field& part : fields_of(v.bytes)) {
            if (part.number == 1) image.height = static_cast<int64_t>(part.varint);
            if (part.number == 2) image.width = static_cast<int64_t>(part.varint);
            if (part.number == 3) image.color_space = static_cast<int64_t>(part.varint);
            if (part.number == 4) image.png = part.bytes;
          }
        }
        if (v.number != 5) continue;
        Histogram& h = e.histograms[tag];
        for (const Field& part : fields_of(v.bytes)) {
          if (part.number == 1) h.min = part.as_double();
          if (part.number == 2) h.max = part.as_double();
          if (part.number == 3) h.num = part.as_double();
          if (part.number == 6) h.limits = doubles(part.bytes);
          if (part.number == 7) h.counts = doubles(part.bytes);
        }
      }
    }
  }
  return e;
}

std::vector<DecodedEvent> decode_file(const std::string& path) {
  const std::string text = read_text(path);
  std::string_view in = text;
  std::vector<DecodedEvent> events;
  while (!in.empty()) {
    uint64_t size = 0;
    uint32_t crc_size = 0, crc_data = 0;
    if (in.size() < 16) {
      ADD_FAILURE() << "torn frame";
      break;
    }
    std::memcpy(&size, in.data(), 8);
    std::memcpy(&crc_size, in.data() + 8, 4);
    EXPECT_EQ(crc_size, masked_crc32c(in.substr(0, 8)));
    if (size > in.size() - 16) {
      ADD_FAILURE() << "frame of " << size << " bytes";
      break;
    }
    std::memcpy(&crc_data, in.data() + 12 + size, 4);
    EXPECT_EQ(crc_data, masked_crc32c(in.substr(12, size)));
    events.push_back(decode_event(in.substr(12, size)));
    in.remove_prefix(16 + size);
  }
  return events;
}

StepReport report_of(int64_t step) {
  StepReport r;
  r.step = step;
  r.loss = 3.25;
  r.total_loss = 3.5;
  r.aux_loss = 1.5;
  r.mtp_losses = {4.5};
  r.lr = 1e-3;
  r.grad_norm = 0.75;
  r.tokens_per_s = 1e4;
  r.moe_layers = {2};
  r.tokens_per_expert = {{30, 10, 0, 0}};
  summarize_loads(r);
  return r;
}

TEST(Crc32c, KnownAnswers) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);            // the check value of CRC-32C
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, appendix B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(masked_crc32c(""), 0xa282ead8u);
}

TEST(EventWriter, FileDecodesToWhatWasWritten) {
  const TestFolder folder;
  EventWriter writer(folder.path(), 0);
  writer.write(report_of(9));
  writer.write(report_of(300));
  writer.write(EvalReport{.step = 300, .valid_loss = 2.75, .valid_tokens = 5, .seconds = 1});
  const auto events = decode_file(writer.path());
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].file_version, "brain.Event:2");
  EXPECT_GT(events[0].wall_time, 1.7e9);
  EXPECT_EQ(events[1].step, 9);
  EXPECT_EQ(events[1].scalars, (std::map<std::string, float>{{"train/loss", 3.25f},
                                                             {"train/total_loss", 3.5f},
                                                             {"train/aux_loss", 1.5f},
                                                             {"train/mtp_loss_0", 4.5f},
                                                             {"train/lr", 1e-3f},
                                                             {"train/grad_norm", 0.75f},
                                                             {"train/tokens_per_s", 1e4f},
                                                             {"expert_load/max", 3.0f},
                                                             {"expert_load/layer_2", 3.0f},
                                                             {"expert_idle/layer_2", 0.5f},
                                                             {"expert_entropy/layer_2", 0.405639056f}}));
  EXPECT_TRUE(events[1].images.empty());
  EXPECT_TRUE(events[1].histograms.empty());
  EXPECT_EQ(events[2].step, 300);
  const Histogram& h = events[2].histograms.at("expert_tokens/layer_2");
  EXPECT_EQ(h.num, 40);
  EXPECT_EQ(h.min, -0.5);
  EXPECT_EQ(h.max, 3.5);
  EXPECT_EQ(h.limits, (std::vector<double>{0.5, 1.5, 2.5, 3.5}));
  EXPECT_EQ(h.counts, (std::vector<double>{30, 10, 0, 0}));
  EXPECT_EQ(events[3].scalars, (std::map<std::string, float>{{"valid/loss", 2.75f}}));
}

TEST(EventWriter, HeatMapAddsUpTheStepsSinceTheLast) {
  const TestFolder folder;
  EventWriter writer(folder.path(), 0);
  StepReport r = report_of(1);
  r.steps = 120;
  std::vector<int64_t> at;
  std::vector<Image> images;
  for (; r.step <= 120; ++r.step) {
    r.tokens_per_expert = r.step % 2 == 1 ? std::vector<std::vector<int64_t>>{{10, 0, 0, 0}}
                                          : std::vector<std::vector<int64_t>>{{0, 10, 0, 0}};
    summarize_loads(r);
    writer.write(r);
  }
  for (const DecodedEvent& e : decode_file(writer.path()))
    for (const auto& [tag, image] : e.images) {
      EXPECT_EQ(tag, "expert_load/heat_map");
      at.push_back(e.step);
      images.push_back(image);
    }
  EXPECT_EQ(at, (std::vector<int64_t>{50, 100, 120})) << "and after the last step";
  ASSERT_EQ(images.size(), 3u);
  EXPECT_EQ(images[0].png, images[2].png) << "only what came since: no sum grows over the run";
  EXPECT_EQ(images[0].color_space, 3);
  const TestPng png = read_png(images[0].png);
  EXPECT_EQ(png.height, images[0].height);
  EXPECT_EQ(png.width, images[0].width);
  const LoadHeatMap empty(r.moe_layers, 4);
  LoadHeatMap wanted(r.moe_layers, 4);
  wanted.draw(std::vector<std::vector<int64_t>>{{250, 250, 0, 0}});
  std::string bytes;
  wanted.canvas().encode(bytes);
  EXPECT_EQ(bytes, images[0].png);
  empty.canvas().encode(bytes);
  EXPECT_NE(bytes, images[0].png);
}

TEST(EventWriter, DropsAndBiasOfRoutersThatHaveThem) {
  const TestFolder folder;
  EventWriter writer(folder.path(), 0);
  StepReport r = report_of(1);
  r.dropped_per_expert = {{10, 0, 0, 0}};
  r.correction_bias = {{0.5, -0.25, 0, 0}};
  summarize_loads(r);
  writer.write(r);
  const auto scalars = decode_file(writer.path()).at(1).scalars;
  EXPECT_EQ(scalars.at("expert_dropped/layer_2"), 0.25f);
  EXPECT_EQ(scalars.at("expert_bias_min/layer_2"), -0.25f);
  EXPECT_EQ(scalars.at("expert_bias_max/layer_2"), 0.5f);
}

TEST(EventWriter, ResumeTellsTensorBoardToForgetLaterSteps) {
  const TestFolder folder;
  const EventWriter first(folder.path(), 0), second(folder.path(), 8);
  EXPECT_LT(first.path(), second.path());  // read in this order
  EXPECT_FALSE(decode_file(first.path()).at(0).session_status);
  const auto events = decode_file(second.path());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].session_status, 1u);
  EXPECT_EQ(events[1].step, 9);
}

// A run that died before its first checkpoint starts over in its folder.
TEST(EventWriter, AFreshStartForgetsTheFilesThatAreThere) {
  const TestFolder folder;
  const EventWriter first(folder.path(), 0), second(folder.path(), 0);
  const auto events = decode_file(second.path());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].session_status, 1u);
  EXPECT_EQ(events[1].step, 1);
}

TEST(EventWriter, DenseModelHasNoExpertTags) {
  const TestFolder folder;
  EventWriter writer(folder.path(), 0);
  StepReport r = report_of(10);
  r.moe_layers.clear();
  r.tokens_per_expert.clear();
  r.mtp_losses.clear();
  summarize_loads(r);
  writer.write(r);
  const auto scalars = decode_file(writer.path()).at(1).scalars;
  EXPECT_EQ(scalars.size(), 5u);
  EXPECT_TRUE(scalars.contains("train/loss"));
}

TEST(EventWriter, MissingFolderIsAnError) {
  const TestFolder folder;
  EXPECT_THROW(EventWriter(folder / "no", 0), Error);
}

}  // namespace
}  // namespace concerto
