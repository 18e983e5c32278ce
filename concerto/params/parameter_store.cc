#include "concerto/params/parameter_store.h"

#include <algorithm>
#include <cstring>

#include "concerto/base/rng.h"

namespace concerto {
namespace {

constexpr int64_t kAlignElements = 64;

struct Layout {
  std::vector<int64_t> offsets, copy_offsets;
  int64_t elements = 0, copy_elements = 0;
};

bool wants_copy(const TensorSpec& s, DType compute) {
  return compute != stat_dtype(compute) && s.shape.rank() >= 2 && !s.keep_f32;
}

DType moment_dtype(DType compute, DType moments) {
  CHECK(moments == DType::kF32 || (moments == DType::kBF16 && compute != DType::kF64), "moments in {}, compute in {}",
        dtype_name(moments), dtype_name(compute));
  return moments == DType::kBF16 ? moments : stat_dtype(compute);
}

// In an inference store with compute copies, only what has no copy needs a place among the masters.
Layout lay_out(const std::vector<TensorSpec>& specs, DType compute, StoreUse use) {
  Layout l;
  for (size_t i = 0; i < specs.size(); ++i) {
    const TensorSpec& s = specs[i];
    const bool joined = i > 0 && s.fused >= 0 && specs[i - 1].fused == s.fused;
    if (!joined) {
      l.elements = align_up(l.elements, kAlignElements);
      l.copy_elements = align_up(l.copy_elements, kAlignElements);
    }
    const bool copy = wants_copy(s, compute), master = use == StoreUse::kTrain || !copy;
    l.offsets.push_back(master ? l.elements : -1);
    l.copy_offsets.push_back(copy ? l.copy_elements : -1);
    if (master) l.elements += s.shape.elements();
    if (copy) l.copy_elements += s.shape.elements();
  }
  l.elements = align_up(l.elements, kAlignElements);
  l.copy_elements = align_up(l.copy_elements, kAlignElements);
  return l;
}

}  // namespace

ParameterStore::ParameterStore(std::vector<TensorSpec> specs, DType compute, StoreUse use, DType moments)
    : specs_(std::move(specs)),
      compute_(compute),
      stat_(stat_dtype(compute)),
      moments_(moment_dtype(compute, moments)),
      use_(use) {
  Layout l = lay_out(specs_, compute_, use_);
  offsets_ = std::move(l.offsets);
  copy_offsets_ = std::move(l.copy_offsets);
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
    gradients_ = buffer("gradients", elements_, stat_);
    moment1_ = buffer("optimizer moments", elements_, moments_);
    moment2_ = buffer("optimizer moments", elements_, moments_);
  }
}

int64_t ParameterStore::predicted_bytes(const std::vector<TensorSpec>& specs, DType compute, StoreUse use,
                                        DType moments) {
  const Layout l = lay_out(specs, compute, use);
  const int64_t stat = dtype_bytes(stat_dtype(compute));
  const int64_t element = use == StoreUse::kTrain ? 2 * stat + 2 * dtype_bytes(moment_dtype(compute, moments)) : stat;
  return element * l.elements + l.copy_elements * dtype_bytes(compute);
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
  return has_copy(r.first) ? slice(copies_, copy_offsets_[r.first], compute_, r.shape)
                           : slice(master_, offsets_[r.first], stat_, r.shape);
}
View ParameterStore::grad(ParamRef r) const {
  return r ? slice(gradients_, offsets_[r.first], stat_, r.shape) : View{};
}
View ParameterStore::master(int i) const { return slice(master_, offsets_[i], stat_, specs_[i].shape); }
View ParameterStore::copy(int i) const {
  return has_copy(i) ? slice(copies_, copy_offsets_[i], compute_, specs_[i].shape) : View{};
}
View ParameterStore::gradient(int i) const { return slice(gradients_, offsets_[i], stat_, specs_[i].shape); }
View ParameterStore::moment1(int i) const { return slice(moment1_, offsets_[i], moments_, specs_[i].shape); }
View ParameterStore::moment2(int i) const { return slice(moment2_, offsets_[i], moments_, specs_[i].shape); }

void ParameterStore::set(int i, const float* values) {
  const int64_t n = specs_[i].shape.elements();
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
  for (int i = 0; i < size(); ++i) {
    if (!has_copy(i) || offsets_[i] < 0) continue;
    const float* m = master(i).as<float>();
    bf16* c = copy(i).as<bf16>();
    for (int64_t j = 0; j < specs_[i].shape.elements(); ++j) c[j] = bf16(m[j]);
  }
}

void ParameterStore::zero_gradients(ThreadPool& pool) {
  const int64_t bytes = elements_ * dtype_bytes(stat_);
  pool.parallel_for(bytes, 1 << 16, [&](int64_t b, int64_t e, int) {
    std::memset(gradients_.data() + b, 0, static_cast<size_t>(e - b));
  });
}

void ParameterStore::initialize(const ModelConfig& config, Init method, uint64_t seed, ThreadPool& pool) {
  for (int i = 0; i < size(); ++i) {
    const TensorSpec& s = specs_[i];
    const double std = init_std(config, s, method);
    const double constant = s.role == TensorRole::kNorm ? 1.0 : 0.0;
    const Rng rng(seed, "init:" + s.name);
    const int64_t n = s.shape.elements();
    // Hugging Face zeroes the embedding row of the padding token.
    const int64_t zero_row =
        s.role == TensorRole::kEmbedding && method == Init::kHuggingFace ? config.pad_token_id : -1;
    const int64_t cols = s.shape[s.shape.rank() - 1];
    pool.parallel_for(n, 4096, [&](int64_t b, int64_t e, int) {
      for (int64_t j = b; j < e; ++j) {
        double x = std == 0 ? constant : std * rng.normal(static_cast<uint64_t>(j));
        if (zero_row >= 0 && j / cols == zero_row) x = 0;
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
