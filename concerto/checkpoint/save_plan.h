// Who writes which slices of which tensors into which files: made once for a layout, by all ranks together.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "concerto/arch/model_spec.h"
#include "concerto/checkpoint/rank_reports.h"
#include "concerto/checkpoint/tensor_box.h"
#include "concerto/tensor/view.h"

namespace concerto {

constexpr std::string_view kWeightPrefix = "weight.", kMoment1Prefix = "moment1.", kMoment2Prefix = "moment2.";

// A rank's part of a tensor.
struct NamedTensor {
  std::string name;       // with one of the prefixes
  View view;              // dense; only read by a save
  int expert = -1;        // global expert id, -1: none
  Shape full_shape = {};  // of the whole tensor; rank 0: the view is all of it
  int cut_dim = -1;       // which dim of it is cut; -1: none
  int64_t cut_begin = 0;  // where the view begins in it
  bool owned = true;      // is this rank the one that writes it? The same slice elsewhere has false.

  const Shape& whole() const { return full_shape.rank() > 0 ? full_shape : view.shape; }
  Box box() const;
};

struct SaveRules {
  int64_t max_file_bytes = 0;
  std::optional<DType> dtype;          // of all tensors in the files; none: as their views
  const ModelConfig* model = nullptr;  // what must be there; null: every tensor that any rank lists
  bool moments = false;                // of `model`: moments too
};

class SavePlan {
 public:
  struct File {
    std::string name;             // weights-00001-of-00002.safetensors
    std::vector<size_t> tensors;  // indices into the rank's list
  };
  // A slice that a rank writes.
  struct Slice {
    std::string name;
    Shape shape;  // of the whole tensor
    DType dtype = DType::kF32;
    int expert = -1;
    Box box;
    size_t file = 0;  // index into file_names()
  };

  bool made() const { return made_; }
  void reset() { *this = SavePlan(); }  // when a rank's list changes: on all ranks
  // Called by all ranks. Error(kCheckpoint), on all of them, unless the owned slices are every tensor exactly once; it
  // names what is missing and what is twice.
  void make(std::span<const NamedTensor> tensors, const SaveRules& rules, const RankReports& reports);
  bool fits(std::span<const NamedTensor> tensors, const SaveRules& rules) const;  // was it made of these?

  const std::vector<File>& files() const { return files_; }              // of this rank
  const std::vector<std::string>& file_names() const { return names_; }  // of all ranks, rank by rank
  // On rank 0: what every rank writes, in the order in which it writes.
  const std::vector<std::vector<Slice>>& slices() const { return slices_; }

 private:
  bool made_ = false;
  uint64_t fingerprint_ = 0;
  std::vector<File> files_;
  std::vector<std::string> names_;
  std::vector<std::vector<Slice>> slices_;
};

}  // namespace concerto
