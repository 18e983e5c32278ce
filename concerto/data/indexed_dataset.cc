#include "concerto/data/indexed_dataset.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "concerto/base/error.h"

namespace concerto {
namespace {

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr int64_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;

template <class T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

int64_t bytes_of_code(uint8_t code) {
  switch (code) {
    case 1:
    case 2:
      return 1;
    case 3:
    case 8:
      return 2;
    case 4:
    case 9:
      return 4;
    case 5:
    case 10:
      return 8;
    default:
      return 0;
  }
}

template <class T>
bool copy_ids(const uint8_t* from, int64_t count, int64_t vocab_size, int32_t* out, int64_t& bad) {
  for (int64_t i = 0; i < count; ++i) {
    const T id = load<T>(from + i * static_cast<int64_t>(sizeof(T)));
    if (std::cmp_less(id, 0) || std::cmp_greater_equal(id, vocab_size)) {
      bad = i;
      return false;
    }
    out[i] = static_cast<int32_t>(id);
  }
  return true;
}

}  // namespace

TokenIndex::TokenIndex(std::span<const uint8_t> bytes, int64_t bin_bytes, const std::string& name) {
  const auto fail = [&](const std::string& field, const std::string& what) {
    throw Error(ErrorCode::kData, fmt::format("{}: {}", name, field), what,
                "Copy the .bin and .idx pair again, or pack it again");
  };
  const auto size = static_cast<int64_t>(bytes.size());
  if (size < kHeaderBytes) fail("header", fmt::format("{} bytes, at least {} wanted", size, kHeaderBytes));
  if (std::memcmp(bytes.data(), "TNTIDX", 6) == 0) fail("magic", "the old TNTIDX layout, MMIDIDX wanted");
  if (std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) fail("magic", "not MMIDIDX");
  const auto version = load<uint64_t>(bytes.data() + 9);
  if (version != 1) fail("version", fmt::format("{}, 1 wanted", version));
  const uint8_t code = bytes[17];
  type_ = static_cast<TokenType>(code);
  type_bytes_ = bytes_of_code(code);
  if (type_bytes_ == 0) fail("dtype", fmt::format("code {} is no integer type", code));
  const auto sequences = load<uint64_t>(bytes.data() + 18), entries = load<uint64_t>(bytes.data() + 26);
  const auto room = static_cast<uint64_t>(size - kHeaderBytes);
  if (sequences > room / 12) fail("sequences", fmt::format("{} do not fit into {} bytes", sequences, size));
  if (entries != (room - sequences * 12) / 8 || (room - sequences * 12) % 8 != 0)
    fail("document index", fmt::format("{} sequences and {} entries do not make {} bytes", sequences, entries, size));
  if (entries == 0) fail("document index", "empty; it starts with 0");
  lengths_ = bytes.data() + kHeaderBytes;
  offsets_ = lengths_ + sequences * 4;
  document_index_ = offsets_ + sequences * 8;
  documents_ = static_cast<int64_t>(entries) - 1;
  for (uint64_t i = 0; i < sequences; ++i) {
    const auto length = load<int32_t>(lengths_ + i * 4);
    const auto offset = load<int64_t>(offsets_ + i * 8);
    if (length < 0) fail("lengths", fmt::format("sequence {} has {} tokens", i, length));
    if (offset < 0 || offset % type_bytes_ != 0)
      fail("offsets", fmt::format("sequence {} starts at byte {}", i, offset));
    if (offset > bin_bytes || length > (bin_bytes - offset) / type_bytes_)
      fail("offsets", fmt::format("sequence {} ends beyond the {} bytes of the .bin file", i, bin_bytes));
    tokens_ += length;
  }
  int64_t last = 0;
  for (uint64_t i = 0; i < entries; ++i) {
    const auto entry = load<int64_t>(document_index_ + i * 8);
    if (entry < last || entry > static_cast<int64_t>(sequences) || (i == 0 && entry != 0))
      fail("document index", fmt::format("entry {} is {}", i, entry));
    for (int64_t s = last + 1; s < entry; ++s)  // the sequences of one document lie together
      if (load<int64_t>(offsets_ + s * 8) !=
          load<int64_t>(offsets_ + (s - 1) * 8) + int64_t{load<int32_t>(lengths_ + (s - 1) * 4)} * type_bytes_)
        fail("offsets", fmt::format("sequence {} does not follow the one before it in its document", s));
    last = entry;
  }
  if (last != static_cast<int64_t>(sequences))
    fail("document index", fmt::format("ends with {}, {} wanted", last, sequences));
}

TokenIndex::Range TokenIndex::document(int64_t i) const {
  const auto first = load<int64_t>(document_index_ + i * 8), end = load<int64_t>(document_index_ + i * 8 + 8);
  Range range{0, 0};
  if (first < end) range.begin = load<int64_t>(offsets_ + first * 8) / type_bytes_;
  for (int64_t s = first; s < end; ++s) range.count += load<int32_t>(lengths_ + s * 4);
  return range;
}

// The prefix itself if both files are there; else what people mistake for it, or have not made yet.
static const std::string& checked_prefix(const std::string& prefix) {
  for (const char* ending : {".idx", ".bin"}) {
    if (path_exists(prefix + ending)) continue;
    std::string fix = "Make the pair: concerto data pack";
    if (prefix.ends_with(".bin") || prefix.ends_with(".idx"))
      fix = fmt::format("Leave the ending out: {}", prefix.substr(0, prefix.size() - 4));
    throw Error(ErrorCode::kIo, prefix + ending, "there is no such file", fix);
  }
  return prefix;
}

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(checked_prefix(prefix)),
      index_file_(prefix + ".idx"),
      token_file_(prefix + ".bin"),
      index_(bytes_of(index_file_), static_cast<int64_t>(token_file_.bytes().size()), prefix + ".idx") {
  const auto bytes = static_cast<int64_t>(token_file_.bytes().size());
  if (bytes % index_.type_bytes() != 0)
    throw Error(ErrorCode::kData, prefix + ".bin",
                fmt::format("{} bytes are no whole number of {}-byte tokens", bytes, index_.type_bytes()),
                "Copy the pair again, or pack it again");
  if (!path_exists(prefix + ".lsm")) return;
  mask_file_.emplace(prefix + ".lsm");
  const auto size = static_cast<int64_t>(mask_file_->bytes().size()), wanted = bytes / index_.type_bytes();
  if (size != wanted)
    throw Error(ErrorCode::kData, prefix + ".lsm", fmt::format("{} bytes, {} wanted: one a token", size, wanted),
                "Copy the files again, or pack them again");
}

void IndexedDataset::read(int64_t document, int64_t begin, int64_t count, int64_t vocab_size, int32_t* out) const {
  const auto range = index_.document(document);
  CHECK(begin >= 0 && count >= 0 && begin + count <= range.count, "document {} has {} tokens, [{}, {}) asked", document,
        range.count, begin, begin + count);
  const uint8_t* from = bytes_of(token_file_).data() + (range.begin + begin) * index_.type_bytes();
  int64_t bad = 0;
  bool ok = true;
  switch (index_.type()) {
    case TokenType::kU8:
      ok = copy_ids<uint8_t>(from, count, vocab_size, out, bad);
      break;
    case TokenType::kI8:
      ok = copy_ids<int8_t>(from, count, vocab_size, out, bad);
      break;
    case TokenType::kI16:
      ok = copy_ids<int16_t>(from, count, vocab_size, out, bad);
      break;
    case TokenType::kU16:
      ok = copy_ids<uint16_t>(from, count, vocab_size, out, bad);
      break;
    case TokenType::kI32:
      ok = copy_ids<int32_t>(from, count, vocab_size, out, bad);
      break;
    case TokenType::kU32:
      ok = copy_ids<uint32_t>(from, count, vocab_size, out, bad);
      break;
    case TokenType::kI64:
      ok = copy_ids<int64_t>(from, count, vocab_size, out, bad);
      break;
    case TokenType::kU64:
      ok = copy_ids<uint64_t>(from, count, vocab_size, out, bad);
      break;
  }
  if (!ok)
    throw Error(ErrorCode::kData, prefix_ + ".bin",
                fmt::format("document {}, token {}: the id is not below the vocabulary's {}", document, begin + bad,
                            vocab_size),
                "Pack the text with this model's tokenizer");
}

void IndexedDataset::read_mask(int64_t document, int64_t begin, int64_t count, uint8_t* out) const {
  const auto range = index_.document(document);
  CHECK(mask_file_ && begin >= 0 && count >= 0 && begin + count <= range.count,
        "document {} has {} tokens, the mask of [{}, {}) asked", document, range.count, begin, begin + count);
  const uint8_t* from = bytes_of(*mask_file_).data() + range.begin + begin;
  for (int64_t i = 0; i < count; ++i) {
    if (from[i] > 1)
      throw Error(ErrorCode::kData, prefix_ + ".lsm",
                  fmt::format("document {}, token {}: the mask is {}, 0 or 1 wanted", document, begin + i, from[i]),
                  "Copy the files again, or pack them again");
    out[i] = from[i];
  }
}

int64_t IndexedDataset::check_mask() const {
  uint8_t mask[4096];
  int64_t trained = 0;
  for (int64_t d = 0; d < documents(); ++d)
    for (int64_t begin = 0, total = document_tokens(d); begin < total; begin += 4096) {
      const int64_t count = std::min<int64_t>(4096, total - begin);
      read_mask(d, begin, count, mask);
      trained += std::count(mask, mask + count, 1);
    }
  return trained;
}

bool IndexedDataset::any_trained() const {
  const std::span<const uint8_t> mask = bytes_of(*mask_file_);
  for (int64_t d = 0; d < documents(); ++d) {
    const auto range = index_.document(d);
    const auto part = mask.subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.count));
    if (std::any_of(part.begin(), part.end(), [](uint8_t m) { return m != 0; })) return true;
  }
  return false;
}

void IndexedDataset::check_vocabulary(int64_t vocab_size) const {
  int32_t ids[4096];
  for (int64_t d = 0; d < documents(); ++d)
    for (int64_t begin = 0, total = document_tokens(d); begin < total; begin += 4096)
      read(d, begin, std::min<int64_t>(4096, total - begin), vocab_size, ids);
}

void IndexedDatasetWriter::Output::append(const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  buffer.insert(buffer.end(), from, from + bytes);
  if (buffer.size() < size_t{1} << 20) return;
  file.write(buffer.data(), buffer.size());
  buffer.clear();
}

void IndexedDatasetWriter::Output::finish() {
  file.write(buffer.data(), buffer.size());
  buffer.clear();
  file.finish();
}

IndexedDatasetWriter::IndexedDatasetWriter(const std::string& prefix, int64_t vocab_size, bool with_mask)
    : prefix_(prefix), vocab_size_(vocab_size) {
  make_directories(parent_directory(prefix));
  token_file_.emplace(prefix + ".bin");
  if (with_mask) mask_file_.emplace(prefix + ".lsm");
}

IndexedDatasetWriter::~IndexedDatasetWriter() {
  if (finished_) return;
  for (const char* ending : {".bin.tmp", ".idx.tmp", ".lsm.tmp"}) {
    try {
      remove_tree(prefix_ + ending);
    } catch (const Error&) {  // what cannot be removed stays, under a name that nobody reads
    }
  }
}

void IndexedDatasetWriter::add_document(std::span<const int32_t> ids, std::span<const uint8_t> mask) {
  CHECK(!finished_ && mask_file_.has_value() == !mask.empty() && (mask.empty() || mask.size() == ids.size()));
  if (ids.size() > INT32_MAX)
    throw Error(ErrorCode::kData, prefix_, fmt::format("a document of {} tokens is too long", ids.size()), "Split it");
  for (const int32_t id : ids) CHECK(id >= 0 && id < vocab_size_, "id {} vocabulary {}", id, vocab_size_);
  if (vocab_size_ < 65536) {
    narrow_.assign(ids.begin(), ids.end());
    token_file_->append(narrow_.data(), narrow_.size() * 2);
  } else {
    token_file_->append(ids.data(), ids.size() * 4);
  }
  if (mask_file_) mask_file_->append(mask.data(), mask.size());
  lengths_.push_back(static_cast<int32_t>(ids.size()));
  tokens_ += static_cast<int64_t>(ids.size());
}

void IndexedDatasetWriter::finish() {
  CHECK(!finished_);
  token_file_->finish();
  if (mask_file_) mask_file_->finish();
  Output index(prefix_ + ".idx");
  const auto put = [&](const auto& value) { index.append(&value, sizeof(value)); };
  const bool narrow = vocab_size_ < 65536;
  index.append(kMagic, sizeof(kMagic));
  put(uint64_t{1});
  put(narrow ? TokenType::kU16 : TokenType::kI32);
  put(static_cast<uint64_t>(lengths_.size()));
  put(static_cast<uint64_t>(lengths_.size() + 1));
  index.append(lengths_.data(), lengths_.size() * 4);
  int64_t offset = 0;
  for (const int32_t length : lengths_) {
    put(offset);
    offset += int64_t{length} * (narrow ? 2 : 4);
  }
  for (int64_t i = 0; i <= documents(); ++i) put(i);
  index.finish();
  remove_tree(prefix_ + ".idx");  // no old index beside new tokens, whenever we are stopped
  remove_tree(prefix_ + ".lsm");
  rename_path(prefix_ + ".bin.tmp", prefix_ + ".bin");
  if (mask_file_) rename_path(prefix_ + ".lsm.tmp", prefix_ + ".lsm");
  rename_path(prefix_ + ".idx.tmp", prefix_ + ".idx");
  sync_directory(parent_directory(prefix_));
  finished_ = true;
}

}  // namespace concerto
