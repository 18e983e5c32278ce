#include "concerto/train/load_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "concerto/base/error.h"
#include "concerto/base/test_folder.h"
#include "concerto/train/crc.h"

namespace concerto {
namespace {

const LoadHead kHead = {.layers = {1, 3}, .experts = 3};

StepReport report_of(int64_t step, bool drops = false, bool bias = false) {
  StepReport r;
  r.step = step;
  r.moe_layers = kHead.layers;
  r.tokens_per_expert = {{step, 40840, 0}, {1, 2, int64_t{1} << 31}};
  if (drops) r.dropped_per_expert = {{0, 840, 0}, {0, 0, 7}};
  if (bias) r.correction_bias = {{0.5, -0.25, 0}, {0, 0, 2}};
  summarize_loads(r);
  return r;
}

void write_steps(const std::string& path, int64_t resume, int64_t last) {
  LoadWriter writer(path, kHead, resume, nullptr);
  for (int64_t step = resume + 1; step <= last; ++step) writer.write(report_of(step));
}

std::vector<int64_t> steps_of(const std::string& path) {
  LoadReader reader(path);
  LoadRecord record;
  std::vector<int64_t> steps;
  while (reader.next(record)) steps.push_back(record.step);
  return steps;
}

using Steps = std::vector<int64_t>;

TEST(LoadFile, ReadsWhatWasWritten) {
  const TestFolder folder;
  const std::string path = folder / "load";
  {
    LoadWriter writer(path, kHead, 0);
    writer.write(report_of(1));
    writer.write(report_of(2, true, true));
    writer.write(report_of(300));
    writer.sync();
  }
  LoadReader reader(path);
  EXPECT_EQ(reader.head(), kHead);
  LoadRecord r;
  ASSERT_TRUE(reader.next(r));
  EXPECT_EQ(r.step, 1);
  EXPECT_EQ(r.tokens, (Steps{1, 40840, 0, 1, 2, int64_t{1} << 31}));
  EXPECT_FALSE(r.has_drops || r.has_bias);
  ASSERT_TRUE(reader.next(r));
  EXPECT_EQ(r.step, 2);
  EXPECT_TRUE(r.has_drops && r.has_bias);
  EXPECT_EQ(r.dropped, (Steps{0, 840, 0, 0, 0, 7}));
  EXPECT_EQ(r.bias, (std::vector<float>{-0.25f, 0.5f, 0, 2}));
  ASSERT_TRUE(reader.next(r));
  EXPECT_EQ(r.step, 300);
  EXPECT_TRUE(r.dropped.empty() && r.bias.empty());
  EXPECT_FALSE(reader.next(r));
  EXPECT_FALSE(reader.damaged());
  EXPECT_EQ(reader.left(), 0);
}

TEST(LoadFile, TakesTwoBytesOfAUsualCount) {
  const TestFolder folder;
  const int64_t layers = 28, experts = 64;
  LoadHead head{.layers = {}, .experts = experts};
  StepReport r;
  for (int64_t l = 0; l < layers; ++l) {
    head.layers.push_back(l + 1);
    r.tokens_per_expert.emplace_back(experts, 40840 * 6 / 64);
  }
  r.moe_layers = head.layers;
  summarize_loads(r);
  LoadWriter writer(folder / "load", head, 0);
  const auto before = std::filesystem::file_size(folder / "load");
  r.step = 1000;
  writer.write(r);
  EXPECT_EQ(std::filesystem::file_size(folder / "load") - before,
            static_cast<size_t>(8 + 2 + 1 + 2 * layers * experts));
}

TEST(LoadFile, ResumedFileEqualsOneThatNeverStopped) {
  const TestFolder folder;
  write_steps(folder / "whole", 0, 12);
  write_steps(folder / "resumed", 0, 9);  // killed behind the checkpoint of step 5
  write_steps(folder / "resumed", 5, 12);
  EXPECT_EQ(read_text(folder / "whole"), read_text(folder / "resumed"));
  write_steps(folder / "whole", 0, 2);
  EXPECT_EQ(steps_of(folder / "whole"), (Steps{1, 2})) << "0 starts anew";
}

// A process may be killed in the midst of any write: whatever is left, the run goes on and counts no step twice.
TEST(LoadFile, CutAnywhereItGoesOn) {
  const TestFolder folder;
  write_steps(folder / "whole", 0, 4);
  const std::string whole = read_text(folder / "whole");
  for (size_t size = 0; size <= whole.size(); ++size) {
    write_text(folder / "cut", whole.substr(0, size));
    std::vector<std::string> said;
    LoadWriter writer(folder / "cut", kHead, 2, [&](const std::string& line) { said.push_back(line); });
    writer.write(report_of(3));
    const Steps steps = steps_of(folder / "cut");
    ASSERT_FALSE(steps.empty()) << size;
    EXPECT_EQ(steps.back(), 3) << size;
    EXPECT_LE(steps.size(), 3u) << size;
    EXPECT_TRUE(steps.size() < 3 || said.empty()) << size;
  }
}

TEST(LoadFile, ATornEndIsNoDamage) {
  const TestFolder folder;
  write_steps(folder / "load", 0, 3);
  const std::string whole = read_text(folder / "load");
  write_text(folder / "load", whole.substr(0, whole.size() - 3));
  LoadReader reader(folder / "load");
  LoadRecord record;
  while (reader.next(record)) {
  }
  EXPECT_EQ(record.step, 2);
  EXPECT_FALSE(reader.damaged());
  EXPECT_GT(reader.left(), 0);
  EXPECT_FALSE(reader.next(record));
}

TEST(LoadFile, DamageEndsItWithAWarning) {
  const TestFolder folder;
  write_steps(folder / "load", 0, 6);
  std::string bytes = read_text(folder / "load");
  bytes[bytes.size() / 2] ^= 1;
  write_text(folder / "load", bytes);
  LoadReader reader(folder / "load");
  LoadRecord record;
  while (reader.next(record)) {
  }
  EXPECT_TRUE(reader.damaged());
  const int64_t last = record.step;
  EXPECT_LT(last, 6);
  std::vector<std::string> said;
  LoadWriter writer(folder / "load", kHead, 6, [&](const std::string& line) { said.push_back(line); });
  writer.write(report_of(7));
  ASSERT_EQ(said.size(), 1u);
  EXPECT_NE(said[0].find(fmt::format("the expert loads of steps {} to 6 are lost", last + 1)), std::string::npos)
      << said[0];
  EXPECT_EQ(steps_of(folder / "load").back(), 7);
  EXPECT_EQ(static_cast<int64_t>(steps_of(folder / "load").size()), last + 1);
}

TEST(LoadFile, AnotherModelsFileIsReplaced) {
  const TestFolder folder;
  write_steps(folder / "load", 0, 3);
  std::vector<std::string> said;
  const LoadHead other = {.layers = {1, 2}, .experts = 3};
  {
    const LoadWriter writer(folder / "load", other, 3, [&](const std::string& line) { said.push_back(line); });
  }
  EXPECT_EQ(said.size(), 1u);
  EXPECT_EQ(LoadReader(folder / "load").head(), other);
  EXPECT_TRUE(steps_of(folder / "load").empty());
}

ErrorCode code_of(const std::string& path) {
  try {
    LoadReader reader(path);
    LoadRecord record;
    while (reader.next(record)) {
    }
  } catch (const Error& e) {
    EXPECT_FALSE(e.fix.empty());
    return e.code;
  }
  return ErrorCode{};
}

std::string framed(const std::string& body) {
  std::string out(8, '\0');
  const auto put = [&](size_t at, uint32_t v) {
    for (size_t i = 0; i < 4; ++i) out[at + i] = static_cast<char>(v >> (8 * i));
  };
  put(0, static_cast<uint32_t>(body.size()));
  put(4, crc32c(body));
  return out + body;
}

TEST(LoadFile, BadHeadsAreErrors) {
  const TestFolder folder;
  EXPECT_EQ(code_of(folder / "none"), ErrorCode::kIo);
  EXPECT_THROW(LoadWriter(folder / "no/load", kHead, 0), Error);
  const std::string path = folder / "load", magic = "CNCLOAD1";
  for (const std::string& bytes :
       {std::string(), std::string("CNCLOAD"), std::string("CNCLOAD2"), magic,
        magic + std::string("\xff\xff\xff\xff\0\0\0\0", 8),
        magic + std::string("\x03\0\0\0\0\0\0\0\x01\x04\x01", 11),   // a wrong check sum
        magic + framed(std::string("\x00\x04", 2)),                  // no layers
        magic + framed("\x01\x00\x01"),                              // then no experts: the C string ends here
        magic + framed(std::string("\x01\x00\x01", 3)),              // no experts
        magic + framed("\x7f\x04\x01"),                              // more layers than bytes
        magic + framed("\x01\xff\xff\xff\xff\xff\xff\xff\x7f\x01"),  // impossibly many experts
        magic + framed("\x01\x04\x01\x01"),                          // a byte too many
        magic + framed("\x01\x04\x81")}) {                           // an open end
    write_text(path, bytes);
    EXPECT_EQ(code_of(path), ErrorCode::kData) << bytes.size();
  }
}

TEST(LoadFile, BadRecordsEndTheFile) {
  const TestFolder folder;
  const std::string head = "CNCLOAD1" + framed("\x01\x02\x05"), first = framed(std::string("\x01\x00\x03\x04", 4));
  const std::string path = folder / "load";
  const auto last_of = [&](const std::string& second, bool damaged) {
    write_text(path, head + first + second);
    LoadReader reader(path);
    LoadRecord record;
    Steps steps;
    while (reader.next(record)) steps.push_back(record.step);
    EXPECT_EQ(reader.damaged(), damaged) << steps.size();
    return steps;
  };
  EXPECT_EQ(last_of(framed(std::string("\x02\x00\x03\x04", 4)), false), (Steps{1, 2}));
  const Steps one = {1};
  EXPECT_EQ(last_of(framed(std::string("\x01\x00\x03\x04", 4)), true), one) << "a step twice";
  EXPECT_EQ(last_of(framed(std::string("\x02\x00\x03", 3)), true), one) << "a count too few";
  EXPECT_EQ(last_of(framed(std::string("\x02\x00\x03\x04\x05", 5)), true), one) << "a count too many";
  EXPECT_EQ(last_of(framed(std::string("\x02\x04\x03\x04", 4)), true), one) << "an unknown flag";
  EXPECT_EQ(last_of(framed(std::string("\x02\x01\x03\x04\x03\x05", 6)), true), one) << "more drops than choices";
  EXPECT_EQ(last_of(framed(std::string("\x02\x01\x03\x04\x03\x04", 6)), false), (Steps{1, 2}));
  EXPECT_EQ(last_of(framed(std::string("\x02\x02\x03\x04\x01\x02", 6)), true), one) << "half a bias";
  EXPECT_EQ(last_of(framed(std::string("\x02\x00\x03\xff\xff\xff\xff\x7f", 8)), true), one) << "more than any batch";
  EXPECT_EQ(last_of(std::string("\xff\xff\xff\x7f\0\0\0\0\0", 9), false), one) << "longer than the file";
  EXPECT_EQ(last_of(framed(""), true), one);
}

// A full disk costs records, not the run.
TEST(LoadFile, GoesOnAfterAFailedWrite) {
  const TestFolder folder;
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  int warnings = 0;
  {
    LoadWriter writer(folder / "load", kHead, 0, [&](const std::string&) { ++warnings; });
    writer.write(report_of(1));
    const auto size = std::filesystem::file_size(folder / "load");
    const rlimit low{size + 5, old.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
    writer.write(report_of(2));
    writer.write(report_of(3));
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
    writer.write(report_of(4));
  }
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(warnings, 1);
  EXPECT_EQ(steps_of(folder / "load"), (Steps{1, 4}));
}

}  // namespace
}  // namespace concerto
