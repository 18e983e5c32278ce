#include "concerto/data/batch_source.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>

#include "concerto/base/error.h"
#include "concerto/data/document_order.h"
#include "concerto/data/indexed_dataset.h"

namespace concerto {
namespace {

// Up to this many tokens all ids and loss masks are checked at the start; in larger files as they are read.
constexpr int64_t kCheckAtStart = int64_t{1} << 25;
// Fine-tuning records are packed this many at a time (as ERNIEKit does), so that a row's records stand near each other
// in the order.
constexpr int64_t kPackWindow = 500;

}  // namespace

// The tokens of one row in order. Those from `tokens` on are read ahead for the targets at the row's end and are no
// part of it.
struct BatchSource::Row {
  explicit Row(const BatchSourceOptions& options) : options(options) {
    const auto room = static_cast<size_t>(options.seq_length + 1 + options.mtp_depth);
    ids.reserve(room);
    trained.reserve(room);
    segments.reserve(room);
  }
  const BatchSourceOptions& options;
  std::vector<int32_t> ids;       // [row + ahead]
  std::vector<uint8_t> trained;   // [row + ahead] the loss mask
  std::vector<int32_t> segments;  // [row + ahead] number of the document within the row
  int64_t tokens = 0;             // of the row itself

  void clear() {
    ids.clear();
    trained.clear();
    segments.clear();
    tokens = 0;
  }
  void append(const IndexedDataset& data, int64_t document, int64_t begin, int64_t count) {
    const size_t at = ids.size();
    const int32_t segment = segments.empty() ? 0 : segments.back() + 1;
    ids.resize(at + count);
    trained.resize(at + count, 1);
    segments.resize(at + count, segment);
    data.read(document, begin, count, options.vocab_size, ids.data() + at);
    if (data.has_mask()) data.read_mask(document, begin, count, trained.data() + at);
  }
  // Whether token `to` continues the text that token `from` belongs to.
  bool joined(int64_t from, int64_t to) const {
    return to < static_cast<int64_t>(ids.size()) && (!options.document_mask || segments[from] == segments[to]);
  }
  int32_t target(int64_t from, int64_t to) const { return joined(from, to) && trained[to] ? ids[to] : kIgnoreIndex; }
};

// Rows by number. A row may be asked for in any order; going forward is cheap.
class BatchSource::Source {
 public:
  virtual ~Source() = default;
  virtual void read_row(int64_t row, Row& out) = 0;
  virtual int64_t rows_per_epoch() const = 0;
};

// Pre-training text: row j is tokens [j * S, (j + 1) * S) of the endless stream of epochs.
class BatchSource::TextSource : public Source {
 public:
  TextSource(IndexedDataset data, const BatchSourceOptions& options, uint64_t number)
      : data_(std::move(data)), options_(options), number_(number) {
    // Both epochs that a row may touch are laid out now, so that no later step allocates.
    for (int64_t e = 0; e < 2; ++e) epoch(e);
  }
  int64_t rows_per_epoch() const override { return (data_.tokens() + options_.seq_length - 1) / options_.seq_length; }

  void read_row(int64_t row, Row& out) override {
    const int64_t begin = row * options_.seq_length, total = data_.tokens();
    int64_t wanted = options_.seq_length + 1 + options_.mtp_depth, e = begin / total, within = begin % total;
    if (options_.one_pass) wanted = std::min(wanted, total - begin);
    const Epoch* current = &epoch(e);
    // The last document that starts at or before the place; empty ones share a start and lie before it.
    size_t d =
        std::upper_bound(current->starts.begin(), current->starts.end() - 1, within) - current->starts.begin() - 1;
    while (wanted > 0) {
      if (d == current->order.size()) {
        current = &epoch(++e);
        d = 0;
        within = 0;
      }
      const int64_t skip = within - current->starts[d];
      const int64_t count = std::min(wanted, current->starts[d + 1] - within);
      if (count > 0) {
        out.append(data_, current->order[d], skip, count);
        wanted -= count;
        within += count;
      }
      ++d;
    }
    out.tokens = std::min(options_.seq_length, static_cast<int64_t>(out.ids.size()));
  }

 private:
  struct Epoch {
    int64_t number = -1;
    std::vector<uint32_t> order;  // document at each place
    std::vector<int64_t> starts;  // [documents + 1] first token of each place
  };

  const Epoch& epoch(int64_t e) {
    Epoch& slot = epochs_[e % 2];
    if (slot.number == e) return slot;
    slot.number = e;
    document_order(options_.seed, number_, e, options_.shuffle && !options_.one_pass, data_.documents(), slot.order);
    slot.starts.resize(slot.order.size() + 1);
    int64_t start = 0;
    for (size_t i = 0; i < slot.order.size(); ++i) {
      slot.starts[i] = start;
      start += data_.document_tokens(slot.order[i]);
    }
    slot.starts.back() = start;
    return slot;
  }

  IndexedDataset data_;
  const BatchSourceOptions& options_;
  uint64_t number_;
  Epoch epochs_[2];
};

// Fine-tuning records: whole documents packed into rows once, the rows shuffled each epoch.
class BatchSource::RecordSource : public Source {
 public:
  RecordSource(IndexedDataset data, const BatchSourceOptions& options, uint64_t number)
      : data_(std::move(data)), options_(options), number_(number) {
    const bool shuffle = options_.shuffle && !options_.one_pass;
    std::vector<uint32_t> order, kept;
    document_order(options_.seed, number_ | uint64_t{1} << 20, 0, shuffle, data_.documents(), order);
    for (const uint32_t d : order) {
      const int64_t count = data_.document_tokens(d);
      if (count > options_.seq_length)
        ++dropped_;
      else if (count > 0)
        kept.push_back(d);
    }
    for (size_t begin = 0; begin < kept.size(); begin += kPackWindow)
      pack(kept, begin, std::min(begin + kPackWindow, kept.size()));
    document_order(options_.seed, number_, 0, shuffle, rows_per_epoch(), order_);
    epoch_ = 0;
  }
  int64_t rows_per_epoch() const override { return static_cast<int64_t>(row_starts_.size()) - 1; }
  int64_t dropped() const { return dropped_; }

  void read_row(int64_t row, Row& out) override {
    const int64_t e = row / rows_per_epoch();
    if (e != epoch_)
      document_order(options_.seed, number_, e, options_.shuffle && !options_.one_pass, rows_per_epoch(), order_);
    epoch_ = e;
    const uint32_t place = order_[row % rows_per_epoch()];
    for (size_t i = row_starts_[place]; i < row_starts_[place + 1]; ++i)
      out.append(data_, documents_[i], 0, data_.document_tokens(documents_[i]));
    out.tokens = static_cast<int64_t>(out.ids.size());
  }

 private:
  // Each record goes to the row with the most room; where that does not do, a new row is opened.
  void pack(const std::vector<uint32_t>& kept, size_t begin, size_t end) {
    std::vector<std::vector<uint32_t>> rows;
    using Room = std::pair<int64_t, int64_t>;  // tokens free, minus the row's number: the oldest of equal ones
    std::priority_queue<Room> rooms;
    for (size_t i = begin; i < end; ++i) {
      const int64_t count = data_.document_tokens(kept[i]);
      Room room{options_.seq_length, -static_cast<int64_t>(rows.size())};
      if (!rooms.empty() && rooms.top().first >= count) {
        room = rooms.top();
        rooms.pop();
      } else {
        rows.emplace_back();
      }
      rows[-room.second].push_back(kept[i]);
      rooms.emplace(room.first - count, room.second);
    }
    for (const auto& row : rows) {
      documents_.insert(documents_.end(), row.begin(), row.end());
      row_starts_.push_back(documents_.size());
    }
  }

  IndexedDataset data_;
  const BatchSourceOptions& options_;
  uint64_t number_;
  int64_t dropped_ = 0, epoch_ = 0;
  std::vector<uint32_t> documents_, order_;
  std::vector<size_t> row_starts_ = {0};
};

BatchSource::BatchSource(const BatchSourceOptions& options) : options_(options) {
  CHECK(options_.vocab_size > 0 && options_.seq_length > 0 && options_.mtp_depth >= 0 && options_.pad_id >= 0 &&
        options_.pad_id < options_.vocab_size);
  if (options_.sources.empty())
    throw Error(ErrorCode::kConfig, "data", "no source is named", "Name the prefix of a .bin/.idx pair");
  double rest = 0;
  for (const auto& source : options_.sources) {
    if (!options_.one_pass && !(source.weight > 0 && std::isfinite(source.weight)))
      throw Error(ErrorCode::kConfig, "data.train", fmt::format("the weight of {} is {}", source.path, source.weight),
                  "Use a number above 0, or leave the source out");
    rest += source.weight;
  }
  for (const auto& source : options_.sources) {
    const uint64_t number = sources_.size();
    IndexedDataset data(source.path);
    if (data.documents() > std::numeric_limits<uint32_t>::max())
      throw Error(ErrorCode::kData, source.path, fmt::format("{} documents are more than 2^32", data.documents()),
                  "Split the file");
    if (data.tokens() == 0)
      throw Error(ErrorCode::kData, source.path, "holds no tokens", "Pack some text: concerto data pack");
    const bool check_now = data.tokens() <= kCheckAtStart;
    if (check_now && data.has_mask()) data.check_mask();
    if (data.has_mask() && !data.any_trained())
      throw Error(ErrorCode::kData, source.path + ".lsm", "no token is to be learnt: the mask is zero everywhere",
                  "Pack the conversations again, some answers with label 1");
    if (check_now) data.check_vocabulary(options_.vocab_size);
    SourceInfo info{.path = source.path, .documents = data.documents(), .tokens = data.tokens()};
    if (data.has_mask()) {
      auto records = std::make_unique<RecordSource>(std::move(data), options_, number);
      info.dropped_documents = records->dropped();
      if (records->rows_per_epoch() == 0)
        throw Error(
            ErrorCode::kData, source.path,
            fmt::format("each of its {} records is longer than seq_length = {}", info.documents, options_.seq_length),
            "Raise training.seq_length, or shorten the records");
      sources_.push_back(std::move(records));
    } else {
      sources_.push_back(std::make_unique<TextSource>(std::move(data), options_, number));
    }
    info.rows = sources_.back()->rows_per_epoch();
    info_.push_back(info);
    share_.push_back(static_cast<uint64_t>(std::llround(std::min(1.0, source.weight / rest) * 0x1p32)));
    rest -= source.weight;
  }
  share_.back() = uint64_t{1} << 32;
  row_ = std::make_unique<Row>(options_);
}

BatchSource::~BatchSource() = default;

int64_t BatchSource::rows_per_pass() const {
  int64_t rows = 0;
  for (const auto& info : info_) rows += info.rows;
  return rows;
}

std::pair<size_t, int64_t> BatchSource::locate(int64_t sample) const {
  CHECK(sample >= 0);
  if (options_.one_pass) {
    for (size_t s = 0; s < sources_.size(); ++s) {
      if (sample < info_[s].rows) return {s, sample};
      sample -= info_[s].rows;
    }
    CHECK(false, "sample beyond the end of the pass");
  }
  // Of the first n samples that reach source s, round(n * share) belong to it and the others go on to the next source:
  // the mix never strays by more than a sample a source, and the place of any sample is known without the ones before
  // it.
  const auto taken = [](int64_t n, uint64_t share) {
    return static_cast<int64_t>((static_cast<unsigned __int128>(n) * share + (uint64_t{1} << 31)) >> 32);
  };
  for (size_t s = 0;; ++s) {
    const int64_t before = taken(sample, share_[s]);
    if (taken(sample + 1, share_[s]) > before) return {s, before};
    sample -= before;
  }
}

void BatchSource::fill(int64_t first_sample, int64_t count, int64_t rows_per_micro_batch,
                       std::vector<MicroBatch>& out) {
  CHECK(count > 0 && rows_per_micro_batch > 0);
  out.resize(static_cast<size_t>((count + rows_per_micro_batch - 1) / rows_per_micro_batch));
  for (auto& batch : out) {
    const int64_t rows = std::min(count, rows_per_micro_batch);
    start(rows_per_micro_batch, batch);
    for (int64_t r = 0; r < rows; ++r) {
      const auto [source, number] = locate(first_sample + r);
      row_->clear();
      sources_[source]->read_row(number, *row_);
      append_row(batch);
    }
    append_mtp(batch);
    first_sample += rows;
    count -= rows;
  }
}

void BatchSource::start(int64_t rows, MicroBatch& batch) {
  const auto room = static_cast<size_t>(rows * options_.seq_length), depth = static_cast<size_t>(options_.mtp_depth);
  for (auto* values : {&batch.token_ids, &batch.positions, &batch.targets}) {
    values->clear();
    values->reserve(room);
  }
  for (auto* values : {&batch.mtp_token_ids, &batch.mtp_targets}) {
    values->clear();
    values->reserve(room * depth);
  }
  batch.doc_offsets.reserve(room + 1);
  batch.doc_offsets.assign(1, 0);
  batch.row_offsets.reserve(static_cast<size_t>(rows) + 1);
  batch.row_offsets.assign(1, 0);
  ahead_ids_.reserve(room * depth);
  ahead_targets_.reserve(room * depth);
  ahead_ids_.clear();
  ahead_targets_.clear();
}

void BatchSource::append_row(MicroBatch& batch) {
  const Row& row = *row_;
  const auto base = static_cast<int32_t>(batch.token_ids.size());
  int32_t position = 0;
  for (int64_t t = 0; t < row.tokens; ++t, ++position) {
    if (t > 0 && !row.joined(t - 1, t)) {
      batch.doc_offsets.push_back(base + static_cast<int32_t>(t));
      position = 0;
    }
    batch.token_ids.push_back(row.ids[t]);
    batch.positions.push_back(position);
    batch.targets.push_back(row.target(t, t + 1));
    for (int64_t d = 0; d < options_.mtp_depth; ++d) {
      ahead_ids_.push_back(row.joined(t, t + 1 + d) ? row.ids[t + 1 + d] : options_.pad_id);
      ahead_targets_.push_back(row.target(t, t + 2 + d));
    }
  }
  batch.doc_offsets.push_back(base + static_cast<int32_t>(row.tokens));
  batch.row_offsets.push_back(base + static_cast<int32_t>(row.tokens));
}

// From [token, depth] to [depth, token].
void BatchSource::append_mtp(MicroBatch& batch) {
  const auto depth = static_cast<size_t>(options_.mtp_depth);
  for (size_t d = 0; d < depth; ++d) {
    for (size_t i = d; i < ahead_ids_.size(); i += depth) {
      batch.mtp_token_ids.push_back(ahead_ids_[i]);
      batch.mtp_targets.push_back(ahead_targets_[i]);
    }
  }
}

}  // namespace concerto
