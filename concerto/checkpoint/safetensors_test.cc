#include "concerto/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "concerto/base/test_folder.h"
namespace concerto {
namespace {

using nlohmann::json;

std::string file_text(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

SafetensorsHeader parse(const std::string& text) {
  return parse_safetensors(std::as_bytes(std::span(text)), "f.safetensors");
}

// What the error says of a file with this header and data; "" if it is accepted.
std::string failure(const std::string& text) {
  try {
    parse(text);
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kModel);
    EXPECT_TRUE(e.where.starts_with("f.safetensors")) << e.where;
    return e.what();
  }
  return "";
}

const std::string kTwo = R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
                         R"("b":{"dtype":"BF16","shape":[],"data_offsets":[16,18]}})";

TEST(Safetensors, ReadsAFileMadeByHand) {
  const std::string text = file_text(kTwo + "  ", std::string("\0\0\x80\x3f\0\0\0\x40\0\0\0\0\0\0\0\0\x80\xbf", 18));
  const SafetensorsHeader header = parse(text);
  ASSERT_EQ(header.entries.size(), 2u);
  EXPECT_EQ(header.entries[0].shape, (Shape{2, 2}));
  EXPECT_EQ(header.entries[1].shape.rank(), 0);
  float a[4], b;
  copy_tensor(header.entries[0], View(a, Shape{2, 2}, DType::kF32));
  copy_tensor(header.entries[1], View(&b, Shape{1}, DType::kF32));
  EXPECT_EQ(a[0], 1.0f);
  EXPECT_EQ(a[1], 2.0f);
  EXPECT_EQ(b, -1.0f);
}

TEST(Safetensors, EveryTruncationIsAnError) {
  const std::string text = file_text(kTwo, std::string(18, '\0'));
  EXPECT_EQ(failure(text), "");
  for (size_t n = 0; n < text.size(); ++n) EXPECT_NE(failure(text.substr(0, n)), "") << n;
  EXPECT_NE(failure(text + "x"), "");
}

TEST(Safetensors, NoFlippedBitOfTheHeaderCrashes) {
  std::string text = file_text(kTwo, std::string(18, '\0'));
  for (size_t bit = 0; bit < (8 + kTwo.size()) * 8; ++bit) {
    text[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    failure(text);  // an Error or a file that is still consistent (another name), nothing else
    text[bit / 8] ^= static_cast<char>(1 << (bit % 8));
  }
}

TEST(Safetensors, EachFaultIsNamed) {
  const auto one = [](const std::string& entry, size_t data = 16) {
    return failure(file_text(R"({"w":)" + entry + "}", std::string(data, '\0')));
  };
  const struct {
    std::string message, expected;
  } cases[] = {
      {one(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16]})"), ""},
      {one(R"({"dtype":"F8_E4M3","shape":[16],"data_offsets":[0,16]})"), "\"w\": has dtype \"F8_E4M3\""},
      {one(R"({"dtype":7,"shape":[16],"data_offsets":[0,16]})"), "\"dtype\" is not a string"},
      {one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,16]})"), "does not have the 16 bytes"},
      {one(R"({"dtype":"F32","shape":4,"data_offsets":[0,16]})"), "\"shape\" is not a list"},
      {one(R"({"dtype":"F32","shape":[-4],"data_offsets":[0,16]})"), "not a whole number"},
      {one(R"({"dtype":"F32","shape":[4.0],"data_offsets":[0,16]})"), "not a whole number"},
      {one(R"({"dtype":"F32","shape":[1,1,1,1,4],"data_offsets":[0,16]})"), "has 5 dims"},
      {one(R"({"dtype":"F32","shape":[4611686018427387908],"data_offsets":[0,16]})"), "does not have"},
      {one(R"({"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,16]})"), "does not have"},
      {one(R"({"dtype":"F32","shape":[4],"data_offsets":[0,17]})"), "truncated"},
      {one(R"({"dtype":"F32","shape":[4],"data_offsets":[16,0]})"), "begin <= end"},
      {one(R"({"dtype":"F32","shape":[4],"data_offsets":[-1,15]})"), "begin <= end"},
      {one(R"({"dtype":"F32","shape":[4],"data_offsets":[0]})"), "not a list of two"},
      {one(R"({"dtype":"F32","shape":[3],"data_offsets":[4,16]})"), "hole"},
      {one(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16]})", 20), "4 bytes follow"},
      {one(R"({"dtype":"F32","shape":[4]})"), "no \"data_offsets\""},
      {one(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16],"x":1})"), "unknown key \"x\""},
      {one("[]"), "not an object"},
      {one(R"([[[[[[1]]]]]])"), "deeper"},
      {failure(file_text(
           R"({"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"v":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
           "abc")),
       "overlap"},
      {failure(file_text(
           R"({"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
           "")),
       "given twice"},
      {failure(file_text(R"({"__metadata__":{"a":1}})", "")), "is not a string"},
      {failure(file_text(R"({"__metadata__":[]})", "")), "is not an object"},
      {failure(file_text("[]", "")), "does not start with"},
      {failure(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10)), "claims a header"},
  };
  for (const auto& c : cases) {
    if (c.expected.empty())
      EXPECT_EQ(c.message, "");
    else
      EXPECT_NE(c.message.find(c.expected), std::string::npos) << c.expected << " in: " << c.message;
  }
}

class SafetensorsFiles : public testing::Test {
 protected:
  ~SafetensorsFiles() override { set_io_fault_for_tests(nullptr); }
  const TestFolder folder_;
  const std::string dir_ = folder_.path();
  std::string path_ = dir_ + "/m.safetensors";
};

TEST_F(SafetensorsFiles, RoundTripOfEveryType) {
  float f[3] = {1.5f, -2.25f, 3e30f};
  double d[2] = {0.1, -1e300};
  int32_t i[2] = {-5, 7};
  int64_t l[1] = {int64_t{1} << 40};
  uint8_t u[3] = {0, 1, 255};
  SafetensorsWriter writer(path_,
                           {{"u", Shape{3}, DType::kU8},
                            {"bf", Shape{3}, DType::kBF16},
                            {"f", Shape{3, 1}, DType::kF32},
                            {"half", Shape{2}, DType::kF16},
                            {"d", Shape{2}, DType::kF64},
                            {"i", Shape{2}, DType::kI32},
                            {"l", Shape{}, DType::kI64},
                            {"none", Shape{0, 4}, DType::kF32}},
                           {{"format", "pt"}});
  std::map<std::string, View> sources{
      {"u", View(u, Shape{3}, DType::kU8)},  {"bf", View(f, Shape{3}, DType::kF32)},
      {"f", View(f, Shape{3}, DType::kF32)}, {"half", View(f, Shape{2}, DType::kF32)},
      {"d", View(d, Shape{2}, DType::kF64)}, {"i", View(i, Shape{2}, DType::kI32)},
      {"l", View(l, Shape{1}, DType::kI64)}, {"none", View(f, Shape{0, 4}, DType::kF32)}};
  std::map<std::string, uint64_t> hashes;
  for (const TensorInfo& tensor : writer.tensors()) hashes[tensor.name] = writer.write(sources.at(tensor.name));
  EXPECT_FALSE(path_exists(path_));
  writer.finish();
  EXPECT_EQ(list_directory(dir_), std::vector<std::string>{"m.safetensors"});

  const SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.header_hash(), writer.header_hash());
  ASSERT_EQ(file.entries().size(), 8u);
  for (const SafetensorsEntry& entry : file.entries()) {
    EXPECT_EQ((entry.data - file.entries()[0].data) % dtype_bytes(entry.dtype), 0) << entry.name;
    EXPECT_EQ(hash64(entry.data, static_cast<size_t>(entry.bytes)), hashes[entry.name]);
    if (entry.dtype == sources.at(entry.name).dtype) {
      EXPECT_EQ(std::memcmp(entry.data, sources.at(entry.name).data, static_cast<size_t>(entry.bytes)), 0);
    }
  }
  EXPECT_EQ(file.require("f").shape, (Shape{3, 1}));
  EXPECT_EQ(file.find("none")->bytes, 0);
  float half[2];
  copy_tensor(file.require("half"), View(half, Shape{2}, DType::kF32));
  EXPECT_EQ(half[1], -2.25f);
  EXPECT_EQ(file.find("x"), nullptr);
  EXPECT_THROW(file.require("x"), Error);
}

TEST_F(SafetensorsFiles, RoundsToNearestEven) {
  const float values[] = {1.0f, 1.00390625f, 1.01171875f, 65504.0f, 65520.0f, 1e-8f, 5.96e-8f, -0.0f, INFINITY, NAN};
  const int64_t n = std::size(values);
  SafetensorsWriter writer(path_, {{"b", Shape{n}, DType::kBF16}, {"h", Shape{n}, DType::kF16}});
  for (int k = 0; k < 2; ++k) writer.write(View(const_cast<float*>(values), Shape{n}, DType::kF32));
  writer.finish();
  const SafetensorsFile file(path_);
  std::vector<float> b(n), h(n);
  copy_tensor(file.require("b"), View(b.data(), Shape{n}, DType::kF32));
  copy_tensor(file.require("h"), View(h.data(), Shape{n}, DType::kF32));
  EXPECT_EQ(b[1], 1.0f);       // half way: to even
  EXPECT_EQ(b[2], 1.015625f);  // half way: to even, upwards
  EXPECT_EQ(h[1], 1.00390625f);
  EXPECT_EQ(h[3], 65504.0f);
  EXPECT_EQ(h[4], INFINITY);
  EXPECT_EQ(h[5], 0.0f);
  EXPECT_EQ(h[6], 0x1p-24f);
  for (const auto& x : {b, h}) {
    EXPECT_TRUE(std::signbit(x[7]));
    EXPECT_EQ(x[8], INFINITY);
    EXPECT_TRUE(std::isnan(x[9]));
  }
}

TEST_F(SafetensorsFiles, LongTensorsAreConvertedInPieces) {
  const int64_t n = 1'000'003;
  std::vector<float> x(n), y(n);
  for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] = static_cast<float>(i % 251);
  SafetensorsWriter writer(path_, {{"x", Shape{n}, DType::kBF16}});
  const uint64_t hash = writer.write(View(x.data(), Shape{n}, DType::kF32));
  writer.finish();
  Hash64 read_hash;
  copy_tensor(SafetensorsFile(path_).require("x"), View(y.data(), Shape{n}, DType::kF32), &read_hash);
  EXPECT_EQ(x, y);
  EXPECT_EQ(read_hash.digest(), hash);
}

TEST_F(SafetensorsFiles, IntegersWidenButFloatsNeverBecomeIntegers) {
  int32_t small[2] = {-1, 3};
  SafetensorsWriter writer(path_, {{"i", Shape{2}, DType::kI32}});
  writer.write(View(small, Shape{2}, DType::kI32));
  writer.finish();
  const SafetensorsFile file(path_);
  int64_t wide[2];
  double real[2];
  uint8_t narrow[2];
  copy_tensor(file.require("i"), View(wide, Shape{2}, DType::kI64));
  copy_tensor(file.require("i"), View(real, Shape{2}, DType::kF64));
  EXPECT_EQ(wide[0], -1);
  EXPECT_EQ(real[1], 3.0);
  EXPECT_THROW(copy_tensor(file.require("i"), View(narrow, Shape{2}, DType::kU8)), Error);
  EXPECT_FALSE(can_convert(DType::kF32, DType::kI64));
}

TEST_F(SafetensorsFiles, FailedOrUnfinishedWritesLeaveNothing) {
  float x[4] = {};
  const std::vector<TensorInfo> tensors{{"x", Shape{4}, DType::kF32}, {"y", Shape{4}, DType::kF32}};
  {
    SafetensorsWriter writer(path_, tensors);
    writer.write(View(x, Shape{4}, DType::kF32));
    EXPECT_THROW(writer.finish(), Bug);  // y is missing
  }
  EXPECT_TRUE(list_directory(dir_).empty());
  for (int fail = 1; fail <= 6; ++fail) {  // open, header, x, y, sync, rename
    int calls = 0;
    set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++calls == fail ? ENOSPC : 0; });
    EXPECT_THROW(
        {
          SafetensorsWriter writer(path_, tensors);
          for (int i = 0; i < 2; ++i) writer.write(View(x, Shape{4}, DType::kF32));
          writer.finish();
        },
        Error);
    set_io_fault_for_tests(nullptr);
    EXPECT_TRUE(list_directory(dir_).empty()) << fail;
  }
}

TEST(SafetensorsGolden, AllOpen) {
  int tensors = 0;
  for (const char* name :
       {"dense-tiny", "moe-tiny", "moe-interval2", "moe-padded", "moe-packed", "vl-tiny", "vl-text-only"})
    for (const char* file : {"model", "golden"}) {
      const SafetensorsFile opened(fmt::format("tests/golden/{}/{}.safetensors", name, file));
      EXPECT_FALSE(opened.entries().empty());
      for (const SafetensorsEntry& entry : opened.entries()) {
        std::vector<double> values(static_cast<size_t>(entry.shape.elements()));
        copy_tensor(entry, View(values.data(), entry.shape, DType::kF64));
        for (double v : values) ASSERT_FALSE(std::isnan(v)) << entry.name;
        ++tensors;
      }
    }
  EXPECT_GT(tensors, 1000);
}

}  // namespace
}  // namespace concerto
