// The segment: the smallest unit a schedule may place. `const` after construction; what one micro-batch needs later
// lives in `Saved`, never in the segment.
//
//   forward          reads `in`, writes what it makes into `out` (which starts as a copy of `in`, so the rest passes
//                    through)
//   backward_input   reads gradients `dout`, writes `din` (starts as a copy of `dout`); overwrites activation gradients;
//                    touches no weight gradient
//   backward_weight  adds to weight gradients in the stat type, or writes them the first time in a step
//                    (ParameterStore::product_gradient), from what forward and backward_input left in Saved
//
// A segment that declares `fuses_weight` (head + loss) makes its weight gradient in backward_input. One activation
// gradient is a sum: `normed` of a MoE layer is read by the router, the shared experts and the routed ones; Dispatch
// writes its gradient, and SharedExperts and Router add theirs into dout.normed, in place. (Where rows travel between
// ranks, SharedExperts comes first and the end of the dispatch adds to it.)
//
// Memory comes from the arenas in Saved:
//   `keep`      from forward to backward_weight, never recomputed: the routing plan
//   `forward`   from forward to backward_weight, or made again by recompute: activations
//   `output`    like `forward`, for the residual stream that the segment hands on (under recompute the unit's last output
//               stays)
//   `backward`  from backward_input to backward_weight: gradients of activations
//   `passing`   from one segment to the next of its unit, in one direction: released when the unit has run
// and from `ctx.scratch` inside one call.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <type_traits>

#include "concerto/base/part.h"
#include "concerto/config/model_config.h"
#include "concerto/layers/router_stats.h"
#include "concerto/ops/backend.h"
#include "concerto/params/parameter_store.h"

namespace concerto {

// The routing units of a micro-batch (ops/routing.h): token ranges that cover it.
struct RoutingUnits {
  View offsets;        // [U + 1] i32
  View capacity;       // [U] i64: room of an expert
  bool drops = false;  // whether it binds: not in generation
};

// The tokens of one micro-batch (data/micro_batch.h), as views.
struct Tokens {
  View ids, positions, targets;  // [T] i32
  View doc_offsets;              // [docs + 1] i32
  View mtp_ids, mtp_targets;     // [depth, T] i32
  int64_t count = 0;             // T
  Part local;                    // the rank's own tokens in sequence parallel layers: all of them on one rank
  RoutingUnits units;
};

struct ExpertTravel;

// What flows between segments of one micro-batch: activations forward, their gradients backward. A null view: nothing
// there. T_r: the rank's own tokens (Tokens::local), on one rank all of them.
struct Acts {
  View hidden;   // [T_r, H] residual stream
  View normed;   // [T_r, H] normed stream inside a layer; after the head: the final norm's output
  View mlp;      // [T_r, H] shared experts' output
  View logits;   // [T_r, E] of the router
  View weights;  // [T_r, K] routing weights
  View rows;  // [R, H] routed rows, sorted by expert; with row_source: row r is row row_source[r] of this, not copied
              // yet
  View row_source;   // [R] i32, or null
  View row_weights;  // [R] stat: the routing weight of each row
  View offsets;      // [E + 1] i32   the dispatch plan (no gradients); [E + 2] where choices may be dropped: their rows
                     // come last, belong to no expert and are zero (ClearDropped, ops/routing.h)
  View row_token;    // [R] i32
  View row_of;       // [T_r, K] i32
  ExpertTravel* travel = nullptr;  // rows on their way to experts of other ranks (parallel/expert_plan.h)
};

struct Saved {
  static constexpr size_t kBytes = 1792;
  Arena* keep = nullptr;
  Arena* forward = nullptr;
  Arena* output = nullptr;
  Arena* backward = nullptr;
  Arena* passing = nullptr;
  alignas(64) std::byte blob[kBytes];

  // The segment's own record; the same bytes from forward to backward_weight.
  template <class T>
  T& as() {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kBytes);
    return *std::launder(reinterpret_cast<T*>(blob));
  }
  template <class T>
  T& start() {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kBytes);
    return *new (blob) T{};
  }
};

// Receives named activations while a golden is compared; null in training.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual bool wants_logits() const = 0;
  // Contiguous or strided rows. Large tensors come a block of rows at a time, in order.
  virtual void record(const std::string& name, View value) = 0;
};

// Loss sums of one micro-batch; index 0 is the language-model loss, 1 + m MTP depth m.
constexpr int kMaxLosses = 1 + static_cast<int>(kMostMtpLayers);
struct LossSums {
  double sum[kMaxLosses] = {};
  double scale[kMaxLosses] = {};  // multiplies gradients: 1 / valid targets of the step (and lambda / depth for MTP)
};

// Keys and values of generated text, a pair a layer.
struct KvCache {
  View* k = nullptr;  // [layers] views [capacity, N_kv * D]
  View* v = nullptr;
  int64_t past = 0;  // rows already there
};

struct SegmentContext {
  Context ops;
  const Tokens* tokens = nullptr;
  LossSums* losses = nullptr;
  RouterStats* router = nullptr;
  Observer* observer = nullptr;
  KvCache* cache = nullptr;    // generation: attention reads and extends it
  bool training = false;       // a backward pass follows
  bool replay = false;         // recompute: routing plans in Saved are used, not made
  bool routed = false;         // choices and drops are in Saved already, made for all micro-batches of a step together
  bool freeze_router = false;  // no gradient for router weights
  bool usual_load = false;     // in a dry run: count rows that come from other ranks as they usually are, not as they
                               // are at worst
};

enum class SegmentKind { kCompute, kCommunication, kFused };

struct SegmentSpec {
  std::string name;  // "layers.3.router"
  int layer = -1;
  SegmentKind kind = SegmentKind::kCompute;
  bool fuses_weight = false;
};

class Segment {
 public:
  explicit Segment(SegmentSpec spec) : spec_(std::move(spec)) {}
  virtual ~Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const SegmentSpec& spec() const { return spec_; }
  virtual void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const = 0;
  virtual void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const = 0;
  virtual void backward_weight(const SegmentContext&, Saved&) const {}

 private:
  SegmentSpec spec_;
};

}  // namespace concerto
