#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_set>

#include "concerto/base/hash.h"
#include "concerto/checkpoint/checkpoint.h"
#include "concerto/checkpoint/rank_reports.h"
#include "concerto/checkpoint/tensor_faults.h"

namespace concerto {
namespace {

// What ranks must know of each other before they read: of every tensor of the checkpoint how many want a part of it, of
// every slice how many read it whole. One sum over all ranks.
struct Votes {
  std::vector<int32_t> counts;  // tensors, then slices
  size_t tensors;
  std::vector<size_t> first;  // of every tensor: its first slice

  explicit Votes(const CheckpointReader& reader) : tensors(reader.tensors().size()) {
    size_t slices = 0;
    for (const CheckpointTensor& tensor : reader.tensors()) {
      first.push_back(slices);
      slices += tensor.slices.size();
    }
    counts.resize(tensors + slices);
  }
  int32_t& wanted(size_t tensor) { return counts[tensor]; }
  int32_t& read_whole(size_t tensor, size_t slice) { return counts[tensors + first[tensor] + slice]; }
};

class Loading {
 public:
  Loading(const std::string& path, std::span<const NamedTensor> tensors)
      : reader_(path), tensors_(tensors), votes_(reader_) {}

  const CheckpointReader& reader() const { return reader_; }
  Votes& votes() { return votes_; }

  void vote() {
    for (const NamedTensor& tensor : tensors_) {
      const CheckpointTensor* have = reader_.find(tensor.name);
      if (!have) continue;
      const auto t = static_cast<size_t>(have - reader_.tensors().data());
      ++votes_.wanted(t);
      if (!(have->shape == tensor.whole())) continue;
      const Box box = tensor.box();
      for (size_t s = 0; s < have->slices.size(); ++s)
        votes_.read_whole(t, s) += intersection(have->slices[s].box, box) == have->slices[s].box;
    }
  }

  // Error for all that does not fit, once the votes of all ranks are there.
  void check() {
    TensorFaults faults("the run");
    std::unordered_set<std::string_view> wanted;
    for (const NamedTensor& tensor : tensors_) {
      CHECK(wanted.insert(tensor.name).second, "{} twice", tensor.name);
      const CheckpointTensor* have = reader_.find(tensor.name);
      if (!have) {
        if (!reader_.meta().weights_only || tensor.name.starts_with(kWeightPrefix))
          faults.missing(tensor.name, tensor.whole());
      } else if (!(have->shape == tensor.whole())) {
        faults.wrong_shape(tensor.name, have->shape, tensor.whole());
      } else if (have->dtype != tensor.view.dtype) {
        faults.wrong_dtype(tensor.name, dtype_name(have->dtype), dtype_name(tensor.view.dtype));
      } else if (have->expert != tensor.expert) {
        faults.wrong_expert(tensor.name, have->expert, tensor.expert);
      }
    }
    for (size_t t = 0; t < reader_.tensors().size(); ++t)
      if (votes_.wanted(t) == 0) faults.extra(reader_.tensors()[t].name, reader_.tensors()[t].shape);
    if (!faults.empty())
      throw Error(ErrorCode::kCheckpoint, reader_.path(), faults.text("does not fit this run"),
                  "\nResume with the settings of the run that wrote it.");
  }

  void read() const {
    for (const NamedTensor& tensor : tensors_) {
      if (const CheckpointTensor* have = reader_.find(tensor.name)) {
        reader_.read_part(*have, tensor.box(), tensor.view);
      } else {
        CHECK(tensor.view.dense());
        if (tensor.view.elements() > 0) std::memset(tensor.view.data, 0, static_cast<size_t>(tensor.view.bytes()));
      }
    }
  }

  // Slices that are read only in parts have their hashes checked as well: each by one rank, in a pass of its own.
  void verify_the_rest(int rank, int ranks) {
    std::vector<std::pair<const CheckpointTensor*, const StoredSlice*>> rest;
    std::vector<int64_t> bytes;
    for (size_t t = 0; t < reader_.tensors().size(); ++t) {
      const CheckpointTensor& tensor = reader_.tensors()[t];
      for (size_t s = 0; s < tensor.slices.size(); ++s) {
        if (votes_.read_whole(t, s) > 0) continue;
        rest.emplace_back(&tensor, &tensor.slices[s]);
        bytes.push_back(tensor.slices[s].box.elements() * dtype_bytes(tensor.dtype));
      }
    }
    const std::vector<int> owners = deal(bytes, ranks);
    for (size_t i = 0; i < rest.size(); ++i)
      if (owners[i] == rank) reader_.verify_slice(*rest[i].first, *rest[i].second);
  }

 private:
  CheckpointReader reader_;
  std::span<const NamedTensor> tensors_;
  Votes votes_;
};

}  // namespace

void load_checkpoint(const std::string& path, CheckpointMeta& meta, std::span<const NamedTensor> tensors,
                     Communicator* world) {
  const CommScope scope("load of a checkpoint");
  const RankReports reports(world);
  std::optional<Loading> loading;
  const auto open = [&] {
    loading.emplace(path, tensors);
    loading->vote();
    return hash_text(loading->reader().manifest_hash());
  };
  reports.agree(open, [&](const std::vector<std::string>& manifests) {
    for (size_t rank = 1; rank < manifests.size(); ++rank)
      if (manifests[rank] != manifests[0])
        throw Error(ErrorCode::kCheckpoint, path,
                    fmt::format("rank {} finds another checkpoint there than rank 0", rank),
                    "Choose a run.dir that all ranks share.");
    return std::string();
  });
  std::vector<int32_t>& votes = loading->votes().counts;
  if (world && !votes.empty())
    world->all_reduce(View(votes.data(), Shape{static_cast<int64_t>(votes.size())}, DType::kI32));
  reports.agree([&] { return loading->check(), std::string(); });
  reports.agree([&] {
    loading->read();
    loading->verify_the_rest(reports.rank(), reports.size());
    return std::string();
  });
  meta = loading->reader().meta();
}

}  // namespace concerto
