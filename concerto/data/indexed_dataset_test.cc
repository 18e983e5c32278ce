#include "concerto/data/indexed_dataset.h"

#include <cstring>
#include <functional>

#include "concerto/base/files.h"
#include "concerto/data/test_data.h"

namespace concerto {
namespace {

std::vector<int32_t> read_document(const IndexedDataset& data, int64_t d, int64_t vocab_size = 1 << 30) {
  std::vector<int32_t> ids(data.document_tokens(d));
  data.read(d, 0, static_cast<int64_t>(ids.size()), vocab_size, ids.data());
  return ids;
}

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// An .idx as another program writes it.
std::string index_bytes(uint8_t type, const std::vector<int32_t>& lengths, const std::vector<int64_t>& offsets,
                        const std::vector<int64_t>& documents) {
  std::string out("MMIDIDX\0\0", 9);
  put(out, uint64_t{1});
  put(out, type);
  put(out, uint64_t{lengths.size()});
  put(out, uint64_t{documents.size()});
  for (const auto v : lengths) put(out, v);
  for (const auto v : offsets) put(out, v);
  for (const auto v : documents) put(out, v);
  return out;
}

TEST(IndexedDataset, WriterAndReaderAgree) {
  const TestFolder folder;
  const Documents documents = {{1, 2, 3}, {}, {65534, 0}, {7}};
  for (const int64_t vocab_size : {65535, 65536, 100000}) {
    write_documents(folder / "a", documents, vocab_size);
    const IndexedDataset data(folder / "a");
    EXPECT_EQ(data.type(), vocab_size < 65536 ? TokenType::kU16 : TokenType::kI32);
    EXPECT_EQ(data.documents(), 4);
    EXPECT_EQ(data.tokens(), 6);
    EXPECT_FALSE(data.has_mask());
    for (size_t d = 0; d < documents.size(); ++d) EXPECT_EQ(read_document(data, d), documents[d]);
    int32_t part[2];
    data.read(0, 1, 2, vocab_size, part);
    EXPECT_EQ(part[0], 2);
    EXPECT_EQ(part[1], 3);
  }
}

TEST(IndexedDataset, MaskLiesBesideTheTokens) {
  const TestFolder folder;
  write_documents(folder / "a", {{1, 2, 3}, {4, 5}}, 10, {{0, 1, 1}, {1, 0}});
  {
    const IndexedDataset data(folder / "a");
    ASSERT_TRUE(data.has_mask());
    uint8_t mask[3] = {9, 9, 9};
    data.read_mask(0, 0, 3, mask);
    EXPECT_EQ(std::vector<uint8_t>(mask, mask + 3), (std::vector<uint8_t>{0, 1, 1}));
    data.read_mask(1, 1, 1, mask);
    EXPECT_EQ(mask[0], 0);
    EXPECT_EQ(data.check_mask(), 3);
    EXPECT_TRUE(data.any_trained());
  }
  write_documents(folder / "a", {{1}}, 10);  // a mask of older files does not stay
  EXPECT_FALSE(IndexedDataset(folder / "a").has_mask());
}

TEST(IndexedDataset, ADamagedMaskIsNamed) {
  const TestFolder folder;
  write_documents(folder / "a", {{1, 2, 3}, {4, 5}}, 10, {{0, 1, 1}, {1, 0}});
  folder.write("a.lsm", std::string("\0\1\1\1\7", 5));
  const IndexedDataset data(folder / "a");
  uint8_t mask[2];
  data.read_mask(1, 0, 1, mask);
  for (const auto& read : {std::function<void()>([&] { data.read_mask(1, 0, 2, mask); }),
                           std::function<void()>([&] { data.check_mask(); })})
    expect_error(ErrorCode::kData, {"a.lsm", "document 1, token 1: the mask is 7"}, read);
}

TEST(IndexedDataset, ReadsEveryIntegerType) {
  const TestFolder folder;
  const auto check = [&](uint8_t code, auto zero) {
    using T = decltype(zero);
    std::string bin;
    for (const int v : {5, 9, 100, 3}) put(bin, static_cast<T>(v));
    folder.write("x.bin", bin);
    folder.write("x.idx", index_bytes(code, {2, 1, 1}, {0, 2 * sizeof(T), 3 * sizeof(T)},
                                      {0, 1, 3}));  // the second document has two sequences
    const IndexedDataset data(folder / "x");
    EXPECT_EQ(data.documents(), 2);
    EXPECT_EQ(read_document(data, 0), (std::vector<int32_t>{5, 9}));
    EXPECT_EQ(read_document(data, 1), (std::vector<int32_t>{100, 3}));
    expect_error(ErrorCode::kData, {"x.bin", "document 1", "token 0"}, [&] { data.check_vocabulary(100); });
  };
  check(1, uint8_t{});
  check(2, int8_t{});
  check(3, int16_t{});
  check(4, int32_t{});
  check(5, int64_t{});
  check(8, uint16_t{});
  check(9, uint32_t{});
  check(10, uint64_t{});
}

TEST(IndexedDataset, NegativeAndHugeIdsAreOutsideEveryVocabulary) {
  const TestFolder folder;
  std::string bin;
  put(bin, int64_t{-1});
  put(bin, int64_t{1} << 40);
  folder.write("x.bin", bin);
  folder.write("x.idx", index_bytes(5, {1, 1}, {0, 8}, {0, 1, 2}));
  const IndexedDataset data(folder / "x");
  expect_error(ErrorCode::kData, {"document 0"}, [&] { read_document(data, 0); });
  expect_error(ErrorCode::kData, {"document 1"}, [&] { read_document(data, 1); });
}

TEST(IndexedDataset, EveryFieldIsChecked) {
  const std::string bin(24, '\0');
  const auto refuse = [&](const std::string& index, const std::string& field) {
    const TestFolder folder;
    folder.write("x.bin", bin);
    folder.write("x.idx", index);
    expect_error(ErrorCode::kData, {"x.idx", field}, [&] { IndexedDataset data(folder / "x"); });
  };
  const std::string good = index_bytes(4, {4, 2}, {0, 16}, {0, 1, 2});
  const auto changed = [&](size_t at, auto value) {
    std::string text = good;
    std::memcpy(text.data() + at, &value, sizeof(value));
    return text;
  };
  {
    const TestFolder folder;
    folder.write("x.bin", bin);
    folder.write("x.idx", good);
    EXPECT_EQ(IndexedDataset(folder / "x").tokens(), 6);
  }
  refuse("", "header");
  refuse("TNTIDX" + good.substr(6), "TNTIDX");
  refuse("X" + good.substr(1), "magic");
  refuse(changed(9, uint64_t{2}), "version");
  refuse(changed(17, uint8_t{6}), "dtype");
  refuse(changed(17, uint8_t{0}), "dtype");
  refuse(changed(18, uint64_t{1} << 60), "sequences");
  refuse(changed(18, uint64_t{3}), "document index");
  refuse(changed(26, ~uint64_t{0}), "document index");
  refuse(good.substr(0, good.size() - 1), "document index");
  refuse(good + "x", "document index");
  refuse(changed(34, int32_t{-1}), "lengths");
  refuse(changed(34, int32_t{7}), "offsets");
  refuse(changed(42, int64_t{-4}), "offsets");
  refuse(changed(42, int64_t{2}), "offsets");
  refuse(changed(42, int64_t{1} << 62), "offsets");
  refuse(changed(58, int64_t{1}), "document index");
  refuse(changed(66, int64_t{3}), "document index");
  refuse(changed(74, int64_t{1}), "document index");
  refuse(index_bytes(4, {1, 1}, {0, 8}, {0, 2}), "does not follow");
  refuse(index_bytes(4, {}, {}, {}), "document index");
}

TEST(IndexedDataset, FilesThatDoNotFitTogetherAreNamed) {
  const TestFolder folder;
  write_documents(folder / "a", {{1, 2, 3}}, 10, {{1, 1, 1}});
  folder.write("a.lsm", "\1");
  expect_error(ErrorCode::kData, {"a.lsm", "3 wanted"}, [&] { IndexedDataset data(folder / "a"); });
  folder.write("a.bin", "12345");
  expect_error(ErrorCode::kData, {"a.idx", "offsets"}, [&] { IndexedDataset data(folder / "a"); });
  folder.write("a.bin", "1234567");
  expect_error(ErrorCode::kData, {"a.bin", "whole number"}, [&] { IndexedDataset data(folder / "a"); });
  std::filesystem::remove(folder / "a.bin");
  expect_error(ErrorCode::kIo, {"a.bin"}, [&] { IndexedDataset data(folder / "a"); });
  expect_error(ErrorCode::kIo, {"none.idx", "concerto data pack"}, [&] { IndexedDataset data(folder / "none"); });
  for (const char* ending : {".idx", ".bin"})
    expect_error(ErrorCode::kIo, {"Leave the ending out: " + (folder / "none")},
                 [&] { IndexedDataset data(folder / std::string("none") + ending); });
}

TEST(IndexedDatasetWriter, LeavesNothingHalfWritten) {
  const TestFolder folder;
  {
    IndexedDatasetWriter writer(folder / "sub/a", 10, true);
    writer.add_document(std::vector<int32_t>{1}, std::vector<uint8_t>{1});
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder / "sub"));
}

TEST(IndexedDatasetWriter, AFullDiskIsAnError) {
  const TestFolder folder;
  write_documents(folder / "a", {{1, 2}}, 10);
  set_io_fault_for_tests(
      [](std::string_view operation, const std::string&) { return operation == "write" ? ENOSPC : 0; });
  expect_error(ErrorCode::kIo, {"a.bin"}, [&] { write_documents(folder / "a", {{3, 4, 5}}, 10); });
  set_io_fault_for_tests(nullptr);
  EXPECT_EQ(read_document(IndexedDataset(folder / "a"), 0), (std::vector<int32_t>{1, 2}));  // the old files are whole
}

}  // namespace
}  // namespace concerto
