#include "concerto/params/parameter_store.h"

#include <algorithm>
#include <cstring>

#include "concerto/base/rng.h"
#include "concerto/ops/elementwise.h"

namespace concerto {
namespace {

constexpr int64_t kAlignElements = 64;

struct Layout {
  std::vector<int64_t> offsets, copy_offsets, moment_offsets;
  int64_t elements = 0, copy_elements = 0, moment_elements = 0;
};

bool is_matrix(const TensorSpec& s) { return s.shape.rank() >= 2 && !s.keep_f32; }

// Of the products that read this tensor; null if none does.
const WeightPacking* packing_of(const TensorSpec& s, const Backend& backend, bool tied_head) {
  switch (s.role) {
    case TensorRole::kEmbedding:
      return tied_head ? backend.linear.packing : nullptr;
    case TensorRole::kHead:
    case TensorRole::kAttentionIn:
    case TensorRole::kAttentionOut:
    case TensorRole::kMlpIn:
    case TensorRole::kMlpDown:
    case TensorRole::kSharedIn:
    case TensorRole::kSharedDown:
    case TensorRole::kMtpProjection:
      return backend.linear.packing;
    case TensorRole::kExpertIn:
    case TensorRole::kExpertDown:
      return backend.grouped_linear.packing;
    default:
      return nullptr;
  }
}

// Whether a product writes the whole gradient.
bool is_product_weight(const TensorSpec& s) {
  return s.trainable && s.shape.rank() >= 2 && s.role != TensorRole::kEmbedding && s.role != TensorRole::kRouter &&
         s.role != TensorRole::kCorrectionBias;
}

DType moment_dtype(DType compute, DType moments) {
  CHECK(moments == DType::kF32 || (moments == DType::kBF16 && compute != DType::kF64), "moments in {}, compute in {}",
        dtype_name(moments), dtype_name(compute));
  return moments == DType::kBF16 ? moments : stat_dtype(compute);
}

// In an inference store with compute copies, only what has no copy needs a place among the masters.
Layout lay_out(const std::vector<TensorSpec>& specs, StoreUse use, const std::vector<uint8_t>& copies,
               const std::vector<uint8_t>& updated) {
  Layout l;
  for (size_t i = 0; i < specs.size(); ++i) {
    const TensorSpec& s = specs[i];
    const bool joined = i > 0 && s.fused >= 0 && specs[i - 1].fused == s.fused;
    if (!joined) {
      l.elements = align_up(l.elements, kAlignElements);
      l.copy_elements = align_up(l.copy_elements, kAlignElements);
      l.moment_elements = align_up(l.moment_elements, kAlignElements);
    }
    const bool copy = copies[i], master = use == StoreUse::kTrain || !copy;
    l.offsets.push_back(master ? l.elements : -1);
    const bool moments = use == StoreUse::kTrain && (updated.empty() || updated[i]);
    l.copy_offsets.push_back(copy ? l.copy_elements : -1);
    l.moment_offsets.push_back(moments ? l.moment_elements : -1);
    if (master) l.elements += s.shape.elements();
    if (copy) l.copy_elements += s.shape.elements();
    if (moments) l.moment_elements += s.shape.elements();
  }
  l.moment_elements = align_up(l.moment_elements, kAlignElements);
  l.elements = align_up(l.elements, kAlignElements);
  l.copy_elements = align_up(l.copy_elements, kAlignElements);
  return l;
}

}  // namespace

ParameterStore::ParameterStore(std::vector<TensorSpec> specs, DType compute, StoreUse use, const Backend* packs_for,
                               DType moments, const std::vector<uint8_t>& updated, GradientsOf gradients)
    : specs_(std::move(specs)),
      compute_(compute),
      stat_(stat_dtype(compute)),
      moments_(moment_dtype(compute, moments)),
      use_(use),
      gradients_of_(gradients) {
  packed_run_of_.assign(specs_.size(), -1);
  tied_head_ =
      std::none_of(specs_.begin(), specs_.end(), [](const TensorSpec& s) { return s.role == TensorRole::kHead; });
  unwritten_.assign(specs_.size(), 0);
  if (packs_for && trains() && compute_ == DType::kBF16) find_packed_runs(*packs_for);
  std::vector<uint8_t> copies;
  for (int i = 0; i < size(); ++i) copies.push_back(wants_copy(i));
  Layout l = lay_out(specs_, use_, copies, updated);
  offsets_ = std::move(l.offsets);
  copy_offsets_ = std::move(l.copy_offsets);
  moment_offsets_ = std::move(l.moment_offsets);
  moment_elements_ = l.moment_elements;
  elements_ = l.elements;
  copy_elements_ = l.copy_elements;
  for (int i = 0; i < size(); ++i) CHECK(index_.emplace(specs_[i].name, i).second, "{} twice", specs_[i].name);
  // Nothing but the model decides how much this is.
  const auto buffer = [](const char* what, int64_t elements, DType type) {
    return Buffer(elements * dtype_bytes(type), {what, "Use a smaller model, or a machine with more memory."});
  };
  master_ = buffer("weights", elements_, stat_);
  copies_ = buffer("weights", copy_elements_, compute_);
  if (trains()) {
    lay_out_work();
    gradients_ = buffer("gradients", gradients_of_ == GradientsOf::kAll ? elements_ : moment_elements_, stat_);
    work_ = buffer("gradients", work_elements_, stat_);
    moment1_ = buffer("optimizer moments", moment_elements_, moments_);
    moment2_ = buffer("optimizer moments", moment_elements_, moments_);
  }
}

// Layers one upon the other, what is outside of them behind.
void ParameterStore::lay_out_work() {
  if (gradients_of_ == GradientsOf::kAll) return;
  work_offsets_.assign(specs_.size(), 0);
  const auto place = [&](auto&& wanted, int64_t at) {
    for (int i = 0; i < size(); ++i) {
      if (!wanted(layer_of(i))) continue;
      const bool joined = i > 0 && specs_[i].fused >= 0 && specs_[i - 1].fused == specs_[i].fused;
      if (!joined) at = align_up(at, kAlignElements);
      work_offsets_[i] = at;
      at += specs_[i].shape.elements();
    }
    return align_up(at, kAlignElements);
  };
  for (int i = 0; i < size(); ++i)
    if (const int layer = layer_of(i); layer != kOutsideLayers)
      layer_elements_ = std::max(layer_elements_, place([&](int l) { return l == layer; }, 0));
  work_elements_ = place([](int l) { return l == kOutsideLayers; }, layer_elements_);
}

// Multi-token prediction's blocks have layer numbers behind the decoder's; they go with the head.
int ParameterStore::layer_of(int i) const {
  const TensorSpec& s = specs_[i];
  return s.layer >= 0 && s.name.starts_with("model.layers.") ? s.layer : kOutsideLayers;
}

bool ParameterStore::wants_copy(int i) const {
  if (compute_ == stat_ || !is_matrix(specs_[i]) || packed_run_of_[i] >= 0) return false;
  return packed_runs_.empty() || specs_[i].role != TensorRole::kEmbedding || tied_head_;
}

void ParameterStore::find_packed_runs(const Backend& backend) {
  int64_t bytes = 0;
  for (int i = 0, end; i < size(); i = end) {
    for (end = i + 1; end < size() && specs_[i].fused >= 0 && specs_[end].fused == specs_[i].fused;) ++end;
    const WeightPacking* packing = packing_of(specs_[i], backend, tied_head_);
    if (!packing || !is_matrix(specs_[i])) continue;
    int64_t rows = 0, groups = 1;
    for (int j = i; j < end; ++j) {
      rows += specs_[j].shape[0];
      groups += j > i && specs_[j].expert != specs_[j - 1].expert;
    }
    PackedWeight place{.packing = packing, .groups = groups, .n = rows / groups, .k = specs_[i].shape[1]};
    const int64_t forward = align_up(packed_forward_bytes(*packing, place.groups, place.n, place.k)),
                  backward = align_up(packed_backward_bytes(*packing, place.groups, place.n, place.k));
    place.forward = reinterpret_cast<char*>(bytes);  // offsets, until there is memory
    place.backward = place.forward + forward;
    bytes += forward + backward;
    std::fill(packed_run_of_.begin() + i, packed_run_of_.begin() + end, static_cast<int>(packed_runs_.size()));
    packed_runs_.push_back({i, end - i, place});
  }
  stale_runs_.assign(packed_runs_.size(), 1);
  packs_ = Buffer(bytes, {"weights", "Use a smaller model, or a machine with more memory."});
  for (PackedRun& run : packed_runs_) {
    run.place.forward = packs_.data() + reinterpret_cast<int64_t>(run.place.forward);
    run.place.backward = packs_.data() + reinterpret_cast<int64_t>(run.place.backward);
  }
}

int64_t ParameterStore::bytes() const {
  const int64_t element = dtype_bytes(stat_);
  return element * elements_ + gradients_.bytes() + work_.bytes() + 2 * dtype_bytes(moments_) * moment_elements_ +
         copy_elements_ * dtype_bytes(compute_) + packs_.bytes();
}

int ParameterStore::find(const std::string& name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? -1 : it->second;
}

ParamRef ParameterStore::ref(const std::string& name) const {
  const int i = find(name);
  return i < 0 ? ParamRef{} : ParamRef{i, 1, specs_[i].shape};
}

ParamRef ParameterStore::ref(const std::string& name, Shape as) const {
  ParamRef r = ref(name);
  if (!r) return r;
  CHECK(r.shape.elements() == as.elements(), "{} is {}, not {}", name, r.shape.str(), as.str());
  r.shape = as;
  return r;
}

ParamRef ParameterStore::fused(const std::string& first_name, int count, Shape shape) const {
  const int first = find(first_name);
  if (first < 0) return {};
  int64_t elements = 0;
  for (int i = first; i < first + count; ++i) {
    CHECK(i < size() && specs_[i].fused >= 0 && specs_[i].fused == specs_[first].fused,
          "{} and the {} after it are not fused", first_name, count - 1);
    elements += specs_[i].shape.elements();
  }
  CHECK(elements == shape.elements(), "{}: {} elements as {}", first_name, elements, shape.str());
  return {first, count, shape};
}

View ParameterStore::slice(const Buffer& buffer, int64_t offset, DType dtype, const Shape& shape) const {
  CHECK(buffer.data() != nullptr && offset >= 0);
  return View(buffer.data() + offset * dtype_bytes(dtype), shape, dtype);
}

bool ParameterStore::has_copy(int i) const { return copy_offsets_[i] >= 0; }

View ParameterStore::weight(ParamRef r) const {
  if (!r) return {};
  if (packed_run_of_[r.first] >= 0) return View(nullptr, r.shape, compute_);
  return has_copy(r.first) ? slice(copies_, copy_offsets_[r.first], compute_, r.shape)
                           : slice(master_, offsets_[r.first], stat_, r.shape);
}
View ParameterStore::table(ParamRef r) const {
  return packed_run_of_[r.first] >= 0 ? slice(master_, offsets_[r.first], stat_, r.shape) : weight(r);
}

PackedWeight ParameterStore::packed(const Context& ctx, ParamRef r) const {
  if (!r || packed_run_of_[r.first] < 0) return {};
  const PackedRun& run = packed_runs_[static_cast<size_t>(packed_run_of_[r.first])];
  CHECK(run.first == r.first && run.count == r.count, "{} of {}: a packed run is read as a whole", r.count, run.count);
  if (stale_ && !ctx.dry_run) pack_stale(ctx);
  return run.place;
}

PackedWeight ParameterStore::packed_from(int i) const {
  const int run = packed_run_of_[i];
  if (run < 0 || packed_runs_[static_cast<size_t>(run)].first != i) return {};
  return packed_runs_[static_cast<size_t>(run)].place;
}

void ParameterStore::pack_stale(const Context& ctx) const {
  for (size_t r = 0; r < packed_runs_.size(); ++r) {
    if (!stale_runs_[r]) continue;
    const PackedWeight& to = packed_runs_[r].place;
    pack_weight(ctx,
                {.from = slice(master_, offsets_[packed_runs_[r].first], stat_, {to.groups, to.n, to.k}), .to = to});
    stale_runs_[r] = 0;
  }
  stale_ = false;
}

void ParameterStore::packed_copies_changed() {
  stale_ = true;
  stale_runs_.assign(packed_runs_.size(), 1);
}

void ParameterStore::packed_copy_changed(int i) {
  if (packed_run_of_[i] < 0) return;
  stale_ = true;
  stale_runs_[static_cast<size_t>(packed_run_of_[i])] = 1;
}

View ParameterStore::grad(ParamRef r) const {
  if (!r) return {};
  CHECK(!unwritten_[r.first], "{}: only products write this gradient", specs_[r.first].name);
  return working(r.first, r.shape);
}

View ParameterStore::working(int first, const Shape& shape) const {
  return gradients_of_ == GradientsOf::kAll ? slice(gradients_, offsets_[first], stat_, shape)
                                            : slice(work_, work_offsets_[first], stat_, shape);
}

ProductGradient ParameterStore::product_gradient(const Context& ctx, ParamRef r) const {
  if (!r) return {};
  const bool fresh = unwritten_[r.first] && !ctx.dry_run;
  if (fresh) std::fill_n(unwritten_.begin() + r.first, r.count, uint8_t{0});
  return {working(r.first, r.shape), !fresh};
}
View ParameterStore::master(int i) const { return slice(master_, offsets_[i], stat_, specs_[i].shape); }
View ParameterStore::copy(int i) const {
  return has_copy(i) ? slice(copies_, copy_offsets_[i], compute_, specs_[i].shape) : View{};
}
View ParameterStore::gradient(int i) const {
  return slice(gradients_, gradients_of_ == GradientsOf::kAll ? offsets_[i] : moment_offsets_[i], stat_,
               specs_[i].shape);
}
View ParameterStore::working_gradient(int i) const { return working(i, specs_[i].shape); }
View ParameterStore::moment1(int i) const { return slice(moment1_, moment_offsets_[i], moments_, specs_[i].shape); }
View ParameterStore::moment2(int i) const { return slice(moment2_, moment_offsets_[i], moments_, specs_[i].shape); }

void ParameterStore::set(int i, const float* values) {
  const int64_t n = specs_[i].shape.elements();
  packed_copy_changed(i);
  if (offsets_[i] >= 0) {
    const View m = master(i);
    if (stat_ == DType::kF64)
      std::copy(values, values + n, m.as<double>());
    else
      std::copy(values, values + n, m.as<float>());
  }
  if (has_copy(i)) {
    bf16* c = copy(i).as<bf16>();
    for (int64_t j = 0; j < n; ++j) c[j] = bf16(values[j]);
  }
}

void ParameterStore::get(int i, float* values) const {
  const int64_t n = specs_[i].shape.elements();
  if (offsets_[i] < 0) {
    const bf16* c = copy(i).as<bf16>();
    for (int64_t j = 0; j < n; ++j) values[j] = static_cast<float>(c[j]);
  } else if (stat_ == DType::kF64) {
    const double* m = master(i).as<double>();
    for (int64_t j = 0; j < n; ++j) values[j] = static_cast<float>(m[j]);
  } else {
    std::memcpy(values, master(i).data, static_cast<size_t>(n) * sizeof(float));
  }
}

void ParameterStore::refresh_copies() {
  for (int i = 0; i < size(); ++i) refresh_copy(i);
}

void ParameterStore::refresh_copy(int i) {
  packed_copy_changed(i);
  if (!has_copy(i) || offsets_[i] < 0) return;
  const float* m = master(i).as<float>();
  bf16* c = copy(i).as<bf16>();
  for (int64_t j = 0; j < specs_[i].shape.elements(); ++j) c[j] = bf16(m[j]);
}

static void zero_bytes(ThreadPool& pool, char* from, int64_t bytes) {
  pool.parallel_for(bytes, 1 << 16,
                    [&](int64_t b, int64_t e, int) { std::memset(from + b, 0, static_cast<size_t>(e - b)); });
}

void ParameterStore::zero(ThreadPool& pool, int first, int count) const {
  int64_t bytes = 0;
  for (int i = first; i < first + count; ++i) bytes += specs_[i].shape.elements() * dtype_bytes(stat_);
  auto* from = static_cast<char*>(working_gradient(first).data);
  zero_bytes(pool, from, bytes);
}

void ParameterStore::clear_gradients(ThreadPool& pool) {
  if (gradients_of_ == GradientsOf::kUpdated)
    for (Buffer* b : {&gradients_, &work_}) zero_bytes(pool, b->data(), b->bytes());
  for (int i = 0; i < size(); ++i) {
    unwritten_[i] = is_product_weight(specs_[i]);
    if (!unwritten_[i]) zero(pool, i, 1);
  }
}

void ParameterStore::settle_layer(ThreadPool& pool, int layer) const {
  for (int i = 0; i < size(); ++i) {
    if (!unwritten_[i] || layer_of(i) != layer) continue;
    zero(pool, i, 1);
    unwritten_[i] = 0;
  }
}

void ParameterStore::add_layer(const Context& ctx, int layer) const {
  CHECK(gradients_of_ == GradientsOf::kUpdated);
  for (int i = 0; i < size(); ++i) {
    if (layer_of(i) != layer) continue;
    unwritten_[i] = is_product_weight(specs_[i]);
    if (specs_[i].trainable && updates(i)) add(ctx, {.a = gradient(i), .b = working_gradient(i), .out = gradient(i)});
  }
  char* const outside = work_.data() + layer_elements_ * dtype_bytes(stat_);
  if (layer == kOutsideLayers)
    zero_bytes(*ctx.pool, outside, work_.data() + work_.bytes() - outside);
  else
    zero_bytes(*ctx.pool, work_.data(), outside - work_.data());
}

// With kUpdated each layer has been settled and added by now.
void ParameterStore::settle_gradients(ThreadPool& pool) const {
  if (gradients_of_ == GradientsOf::kUpdated) return;
  for (int i = 0; i < size(); ++i) {
    if (unwritten_[i]) zero(pool, i, 1);
    unwritten_[i] = 0;
  }
}

namespace {

// Of an element of a slice, the number in the whole tensor.
int64_t place_in_whole(const TensorSpec& s, int64_t j) {
  if (s.cut_dim < 0) return j;
  const int64_t cols = s.shape.rank() == 1 ? 1 : s.shape[1], whole_cols = s.shape.rank() == 1 ? 1 : s.whole()[1];
  const int64_t row = j / cols + (s.cut_dim == 0 ? s.cut_begin : 0),
                col = j % cols + (s.cut_dim == 1 ? s.cut_begin : 0);
  return row * whole_cols + col;
}

}  // namespace

void ParameterStore::initialize(const ModelConfig& config, Init method, uint64_t seed, ThreadPool& pool) {
  packed_copies_changed();
  for (int i = 0; i < size(); ++i) {
    const TensorSpec& s = specs_[i];
    const double std = init_std(config, s, method);
    const double constant = s.role == TensorRole::kNorm ? 1.0 : 0.0;
    const Rng rng(seed, "init:" + s.name);
    const int64_t n = s.shape.elements();
    // Hugging Face zeroes the embedding row of the padding token.
    const int64_t zero_row =
        s.role == TensorRole::kEmbedding && method == Init::kHuggingFace ? config.pad_token_id : -1;
    const int64_t cols = s.whole()[s.shape.rank() - 1];
    pool.parallel_for(n, 4096, [&](int64_t b, int64_t e, int) {
      for (int64_t j = b; j < e; ++j) {
        const int64_t of_whole = place_in_whole(s, j);
        double x = std == 0 ? constant : std * rng.normal(static_cast<uint64_t>(of_whole));
        if (zero_row >= 0 && of_whole / cols == zero_row) x = 0;
        if (offsets_[i] >= 0) {
          if (stat_ == DType::kF64)
            master(i).as<double>()[j] = static_cast<float>(x);
          else
            master(i).as<float>()[j] = static_cast<float>(x);
        }
        if (has_copy(i)) copy(i).as<bf16>()[j] = bf16(static_cast<float>(x));
      }
    });
  }
}

}  // namespace concerto
