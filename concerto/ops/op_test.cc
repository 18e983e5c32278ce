#include "concerto/ops/op_test.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "concerto/ops/cpu/cpu_backend.h"
#include "concerto/ops/ref/ref_backend.h"

namespace concerto::test {
namespace {

// Null where the processor lacks the level that CONCERTO_ISA names.
const Backend* cpu_if_there() {
  try {
    return &cpu_backend();
  } catch (const Error& e) {
    if (e.code != ErrorCode::kUnsupported) throw;
  }
  return nullptr;
}

ThreadPool& pool_of(int threads) {
  static std::map<int, std::unique_ptr<ThreadPool>> pools;
  auto& pool = pools[threads];
  if (!pool) pool = std::make_unique<ThreadPool>(threads);
  return *pool;
}

double read(const View& v, int64_t row, int64_t col) {
  const int64_t i = row * v.row_stride + col;
  switch (v.dtype) {
    case DType::kF32:
      return v.as<float>()[i];
    case DType::kF64:
      return v.as<double>()[i];
    case DType::kBF16:
      return static_cast<float>(v.as<bf16>()[i]);
    case DType::kI32:
      return v.as<int32_t>()[i];
    case DType::kI64:
      return static_cast<double>(v.as<int64_t>()[i]);
    default:
      CHECK(false);
  }
}

void write(const View& v, int64_t row, int64_t col, double value) {
  const int64_t i = row * v.row_stride + col;
  switch (v.dtype) {
    case DType::kF32:
      v.as<float>()[i] = static_cast<float>(value);
      return;
    case DType::kF64:
      v.as<double>()[i] = value;
      return;
    case DType::kBF16:
      v.as<bf16>()[i] = bf16(static_cast<float>(value));
      return;
    case DType::kI32:
      v.as<int32_t>()[i] = static_cast<int32_t>(value);
      return;
    case DType::kI64:
      v.as<int64_t>()[i] = static_cast<int64_t>(value);
      return;
    default:
      CHECK(false);
  }
}

}  // namespace

std::vector<BackendCase> backend_cases() {
  std::vector<BackendCase> cases;
  for (const Backend* backend : {&ref_backend(), cpu_if_there()})
    for (DType type : {DType::kF32, DType::kBF16, DType::kF64})
      if (backend && backend->has(type)) cases.push_back({backend->name, type});
  return cases;
}

std::ostream& operator<<(std::ostream& out, const BackendCase& c) {
  return out << c.backend << " " << dtype_name(c.type);
}

const Backend& find_backend(const std::string& name) {
  if (name == ref_backend().name) return ref_backend();
  const Backend* cpu = cpu_if_there();
  CHECK(cpu && name == cpu->name, "backend {}", name);
  return *cpu;
}

std::string case_name(const testing::TestParamInfo<BackendCase>& info) {
  return info.param.backend + "_" + std::string(dtype_name(info.param.type));
}

OpRun::OpRun(const Backend& backend, DType type, DType round_as, int threads, int64_t scratch_bytes)
    : type_(type), round_as_(round_as), arena_(scratch_bytes < 0 ? Arena() : Arena(scratch_bytes)) {
  context_.backend = &backend;
  context_.pool = &pool_of(threads);
  context_.scratch = &arena_;
  context_.dry_run = scratch_bytes < 0;
  arena_.poison();
}

DType OpRun::type_of(Kind kind) const {
  switch (kind) {
    case Kind::kCompute:
      return type_;
    case Kind::kStat:
      return stat_dtype(type_);
    case Kind::kI32:
      return DType::kI32;
    case Kind::kI64:
      return DType::kI64;
    case Kind::kF64:
      return DType::kF64;
  }
  return type_;
}

View OpRun::hold(const std::string& name, Kind kind, Shape shape, const Values* values, Bound bound, int64_t gap) {
  View view(nullptr, shape, type_of(kind));
  view.row_stride += gap;
  if (dry()) return view;
  if (values)
    CHECK(static_cast<int64_t>(values->size()) == shape.elements(), "{} values for {}", values->size(), shape.str());
  Held& held = held_.emplace_back();
  held.name = name;
  held.bound = bound;
  // 0xff is NaN in every float type and -1 in the integers. One element more, so that no view is null.
  held.memory.assign(static_cast<size_t>((view.rows() * view.row_stride + 1) * dtype_bytes(view.dtype)), '\xff');
  view.data = held.memory.data();
  held.view = view;
  const DType round = kind == Kind::kCompute ? round_as_ : kind == Kind::kStat ? stat_dtype(round_as_) : view.dtype;
  if (values)
    for (int64_t r = 0, i = 0; r < view.rows(); ++r)
      for (int64_t c = 0; c < view.cols(); ++c) write(view, r, c, round_to(round, (*values)[static_cast<size_t>(i++)]));
  held.before = held.memory;
  return view;
}

View OpRun::in(Kind kind, Shape shape, const Values& values, int64_t gap) {
  return hold("", kind, shape, &values, {}, gap);
}

View OpRun::out(const std::string& name, Kind kind, Shape shape, Bound bound, int64_t gap) {
  return hold(name, kind, shape, nullptr, bound, gap);
}

View OpRun::inout(const std::string& name, Kind kind, Shape shape, const Values& start, Bound bound, int64_t gap) {
  return hold(name, kind, shape, &start, bound, gap);
}

Outputs OpRun::finish() {
  Outputs outputs;
  for (Held& held : held_) {
    if (held.name.empty()) {
      EXPECT_TRUE(held.memory == held.before) << "an input of shape " << held.view.shape.str() << " was written";
      continue;
    }
    Output& output = outputs[held.name];
    output.bound = held.bound;
    output.type = held.view.dtype;
    const int64_t size = dtype_bytes(held.view.dtype), row_bytes = held.view.row_stride * size;
    const int64_t used = held.view.cols() * size, rows = held.view.rows();
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < held.view.cols(); ++c) output.values.push_back(read(held.view, r, c));
      std::memcpy(held.memory.data() + r * row_bytes, held.before.data() + r * row_bytes, static_cast<size_t>(used));
    }
    EXPECT_TRUE(held.memory == held.before) << held.name << ": memory between rows was written";
  }
  return outputs;
}

Outputs run_op(const Backend& backend, DType type, DType round_as, int threads, const Body& body) {
  OpRun dry(backend, type, round_as, threads, -1);
  body(dry);
  OpRun run(backend, type, round_as, threads, dry.scratch_used());
  body(run);
  EXPECT_EQ(run.scratch_used(), dry.scratch_used()) << "the dry run took other scratch";
  return run.finish();
}

void check_op(const BackendCase& c, const Body& body, bool threads_agree) {
  const Backend& backend = find_backend(c.backend);
  const Outputs truth = run_op(find_backend("ref"), DType::kF64, c.type, 1, body);
  Outputs first;
  for (int threads : {2, 1, 3}) {
    const Outputs got = run_op(backend, c.type, c.type, threads, body),
                  again = run_op(backend, c.type, c.type, threads, body);
    if (first.empty()) first = got;
    for (const auto& [name, output] : got) {
      EXPECT_TRUE(same_bits(output.values, again.at(name).values)) << name << " differs when run again";
      if (threads_agree) {
        EXPECT_TRUE(same_bits(output.values, first.at(name).values))
            << name << " differs with " << threads << " threads";
      }
      if (!output.bound.compared) continue;
      const Values& want = truth.at(name).values;
      ASSERT_EQ(output.values.size(), want.size());
      const double norm = output.bound.norm > 0 ? output.bound.norm : largest(want);
      const double inside =
          (4 + std::sqrt(static_cast<double>(output.bound.length))) * unit_roundoff(stat_dtype(c.type)) * norm +
          (output.bound.rounds_inside ? 4 * unit_roundoff(c.type) * largest(want) : 0);
      const bool whole = output.type == DType::kI32 || output.type == DType::kI64;
      for (size_t i = 0; i < want.size(); ++i) {
        const double tolerance = whole ? 0 : 1.01 * unit_roundoff(output.type) * std::fabs(want[i]) + inside;
        ASSERT_TRUE(std::fabs(output.values[i] - want[i]) <= tolerance)
            << name << "[" << i << "] is " << output.values[i] << ", wanted " << want[i] << " within " << tolerance
            << ", " << threads << " threads";
      }
    }
  }
}

Outputs run_f64(const Body& body) { return run_op(find_backend("ref"), DType::kF64, DType::kF64, 1, body); }

Values output_f64(const Body& body, const std::string& name) { return run_f64(body).at(name).values; }

void check_gradient(const char* what, Values x, const Values& gradient, const std::function<double(const Values&)>& f) {
  ASSERT_EQ(x.size(), gradient.size()) << what;
  // Error of the central difference: rounding of f over h, and h^2 times the third derivative, taken to be of the size
  // of the gradient.
  const double h = 1e-5, tolerance = 100 * (unit_roundoff(DType::kF64) / h * (1 + std::fabs(f(x))) +
                                            h * h * (1 + largest(gradient)));
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + h;
    const double up = f(x);
    x[i] = at - h;
    const double down = f(x);
    x[i] = at;
    ASSERT_NEAR((up - down) / (2 * h), gradient[i], tolerance) << what << "[" << i << "]";
  }
}

double unit_roundoff(DType type) {
  switch (type) {
    case DType::kF32:
      return 0x1p-24;
    case DType::kBF16:
      return 0x1p-8;
    default:
      return 0x1p-53;
  }
}

double round_to(DType type, double value) {
  if (type == DType::kF32) return static_cast<float>(value);
  if (type == DType::kBF16) return static_cast<float>(bf16(static_cast<float>(value)));
  return value;
}

Values rounded(Values values, DType type) {
  for (double& v : values) v = round_to(type, v);
  return values;
}

Values normal(const char* name, int64_t n, double scale) {
  const Rng rng(7, name);
  Values values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = scale * rng.normal(i);
  return values;
}

Values integers(std::initializer_list<int64_t> list) { return {list.begin(), list.end()}; }

Values minus(const Values& a, const Values& b) {
  CHECK(a.size() == b.size());
  Values difference = a;
  for (size_t i = 0; i < a.size(); ++i) difference[i] -= b[i];
  return difference;
}

double dot(const Values& a, const Values& b) {
  CHECK(a.size() == b.size());
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double largest(const Values& v) {
  double m = 0;
  for (double x : v) m = std::max(m, std::fabs(x));
  return m;
}

double largest_row_norm(const Values& v, int64_t cols) {
  double best = 0;
  for (size_t r = 0; r + static_cast<size_t>(cols) <= v.size(); r += static_cast<size_t>(cols)) {
    double sum = 0;
    for (size_t i = r; i < r + static_cast<size_t>(cols); ++i) sum += v[i] * v[i];
    best = std::max(best, sum);
  }
  return std::sqrt(best);
}

bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

Values slice(const Values& v, int64_t begin, int64_t count) {
  return Values(v.begin() + begin, v.begin() + begin + count);
}

}  // namespace concerto::test
