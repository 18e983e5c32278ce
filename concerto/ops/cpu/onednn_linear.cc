#include "concerto/ops/cpu/onednn_linear.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <dnnl.hpp>
#include <memory>
#include <vector>

#include "concerto/ops/checks.h"
#include "concerto/ops/cpu/product.h"

namespace concerto::cpu {
namespace {

using dnnl::memory;

constexpr int64_t kSliceGrain = 16;  // rows; slices of a product have at most three sizes

memory::data_type type_of(DType type) {
  return type == DType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
}

const dnnl::engine& engine() {
  static const dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}

// oneDNN asks OpenMP for its number of threads when it makes and when it runs a primitive. The setting belongs to the
// calling thread.
void be_single_threaded() {
  thread_local bool done = false;
  if (done) return;
  omp_set_num_threads(1);
  done = true;
}

// C[m, n] (+)= A B + bias: what tells one primitive from another. Strides in elements.
struct Key {
  int64_t m, n, k, a_row, a_column, b_row, b_column, c_row;
  DType input, output;
  bool bias, accumulate;
  bool operator==(const Key&) const = default;
};

struct Operands {
  void *a, *b, *c;
  const void* bias;
};

// Memory handles of one thread for one primitive: their data pointers change with every call.
struct Handles {
  memory a, b, c, bias, scratch;
};

struct Primitive {
  Key key;
  dnnl::matmul matmul;
  size_t scratch_bytes = 0;
  std::vector<Handles> of_thread;
  uint64_t used = 0;  // by the cache's clock

  Primitive(const Key& key, int threads) : key(key) {
    const memory::desc a({key.m, key.k}, type_of(key.input), memory::dims{key.a_row, key.a_column});
    const memory::desc b({key.k, key.n}, type_of(key.input), memory::dims{key.b_row, key.b_column});
    const memory::desc c({key.m, key.n}, type_of(key.output), memory::dims{key.c_row, 1});
    const memory::desc bias({1, key.n}, memory::data_type::f32, memory::dims{key.n, 1});
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (key.accumulate) {
      dnnl::post_ops add;
      add.append_sum(1.0f);
      attributes.set_post_ops(add);
    }
    const dnnl::matmul::desc what = key.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
    const dnnl::matmul::primitive_desc how(what, attributes, engine());
    matmul = dnnl::matmul(how);
    scratch_bytes = how.scratchpad_desc().get_size();
    for (int i = 0; i < threads; ++i)
      of_thread.push_back({memory(a, engine(), nullptr), memory(b, engine(), nullptr), memory(c, engine(), nullptr),
                           memory(bias, engine(), nullptr), memory(how.scratchpad_desc(), engine(), nullptr)});
  }

  void run(const dnnl::stream& stream, int thread, const Operands& o, void* scratch) {
    Handles& h = of_thread[static_cast<size_t>(thread)];
    h.a.set_data_handle(o.a);
    h.b.set_data_handle(o.b);
    h.c.set_data_handle(o.c);
    h.scratch.set_data_handle(scratch);
    dnnl_exec_arg_t args[5] = {{DNNL_ARG_SRC, h.a.get()},
                               {DNNL_ARG_WEIGHTS, h.b.get()},
                               {DNNL_ARG_DST, h.c.get()},
                               {DNNL_ARG_SCRATCHPAD, h.scratch.get()},
                               {}};
    int count = 4;
    if (key.bias) {
      h.bias.set_data_handle(const_cast<void*>(o.bias));
      args[count++] = {DNNL_ARG_BIAS, h.bias.get()};
    }
    const dnnl_status_t status = dnnl_primitive_execute(matmul.get(), stream.get(), count, args);
    CHECK(status == dnnl_success, "oneDNN: status {}", static_cast<int>(status));
  }
};

// Primitives of one calling thread, so that no lock is needed: the calling thread looks up, its pool's threads run.
class Cache {
 public:
  Primitive& get(const Key& key, int threads) {
    ++clock_;
    for (const auto& p : kept_)
      if (p->key == key && p->of_thread.size() >= static_cast<size_t>(threads)) {
        p->used = clock_;
        return *p;
      }
    be_single_threaded();
    auto made = std::make_unique<Primitive>(key, threads);
    made->used = clock_;
    if (kept_.size() < kMaxPrimitives) return *kept_.emplace_back(std::move(made));
    auto& oldest =
        *std::min_element(kept_.begin(), kept_.end(), [](const auto& x, const auto& y) { return x->used < y->used; });
    oldest = std::move(made);
    return *oldest;
  }
  int size() const { return static_cast<int>(kept_.size()); }

 private:
  std::vector<std::unique_ptr<Primitive>> kept_;
  uint64_t clock_ = 0;
};

Cache& cache() {
  thread_local Cache c;
  return c;
}

const dnnl::stream& thread_stream() {
  thread_local const dnnl::stream s(engine());
  return s;
}

struct Slice {
  int64_t begin, size;
};
Slice slice_of(int64_t rows, int threads, int thread) {
  const int64_t units = (rows + kSliceGrain - 1) / kSliceGrain;
  const int64_t begin = units * thread / threads * kSliceGrain,
                end = std::min(rows, units * (thread + 1) / threads * kSliceGrain);
  return {begin, std::max<int64_t>(0, end - begin)};
}

// The product of `whole`, a slice of the m rows of C to each thread. `at(first row)` gives the operands of a slice.
template <class At>
void run_slices(const Context& ctx, const Key& whole, At&& at) {
  const int threads = ctx.pool->size();
  constexpr int kMaxSizes = 3;
  Primitive* by_size[kMaxSizes] = {};
  int sizes = 0;
  size_t scratch_bytes = 0;
  for (int t = 0; t < threads; ++t) {
    Key key = whole;
    key.m = slice_of(whole.m, threads, t).size;
    if (key.m == 0 || std::any_of(by_size, by_size + sizes, [&](const Primitive* p) { return p->key.m == key.m; }))
      continue;
    CHECK(sizes < kMaxSizes);
    by_size[sizes] = &cache().get(key, threads);
    scratch_bytes = std::max(scratch_bytes, by_size[sizes++]->scratch_bytes);
  }
  ArenaScope scope(*ctx.scratch);
  const int64_t scratch_stride = align_up(static_cast<int64_t>(scratch_bytes));
  char* scratch = static_cast<char*>(ctx.scratch->take_bytes(scratch_stride * threads));
  if (ctx.dry_run) return;
  ctx.pool->run([&](int t) {
    const Slice slice = slice_of(whole.m, threads, t);
    if (slice.size == 0) return;
    be_single_threaded();
    for (int i = 0; i < sizes; ++i)
      if (by_size[i]->key.m == slice.size)
        by_size[i]->run(thread_stream(), t, at(slice.begin), scratch + t * scratch_stride);
  });
}

void* at(const View& v, int64_t element) { return static_cast<char*>(v.data) + element * dtype_bytes(v.dtype); }

void forward(const Context& ctx, const LinearForward& a) {
  const int64_t n = a.w.dim(0), k = a.w.dim(1);
  const Key key{.m = a.x.rows(),
                .n = n,
                .k = k,
                .a_row = a.x.row_stride,
                .a_column = 1,
                .b_row = 1,
                .b_column = k,
                .c_row = a.y.row_stride,
                .input = a.x.dtype,
                .output = a.y.dtype,
                .bias = is_given(a.bias),
                .accumulate = false};
  run_slices(ctx, key, [&](int64_t row) {
    return Operands{at(a.x, row * a.x.row_stride), a.w.data, at(a.y, row * a.y.row_stride), a.bias.data};
  });
}

void backward_input(const Context& ctx, const LinearBackwardInput& a) {
  const int64_t n = a.w.dim(1), k = a.w.dim(0);
  const Key key{.m = a.dy.rows(),
                .n = n,
                .k = k,
                .a_row = a.dy.row_stride,
                .a_column = 1,
                .b_row = n,
                .b_column = 1,
                .c_row = a.dx.row_stride,
                .input = a.dy.dtype,
                .output = a.dx.dtype,
                .bias = false,
                .accumulate = a.accumulate};
  run_slices(ctx, key, [&](int64_t row) {
    return Operands{at(a.dy, row * a.dy.row_stride), a.w.data, at(a.dx, row * a.dx.row_stride), nullptr};
  });
}

void backward_weight(const Context& ctx, const LinearBackwardWeight& a) {
  const int64_t m = a.dy.cols(), n = a.x.cols();
  if (a.x.rows() == 0) {  // oneDNN leaves a result without a sum as it is
    if (!ctx.dry_run) std::memset(a.dw.data, 0, static_cast<size_t>(m * n) * sizeof(float));
    return;
  }
  const Key key{.m = m,
                .n = n,
                .k = a.x.rows(),
                .a_row = 1,
                .a_column = a.dy.row_stride,
                .b_row = a.x.row_stride,
                .b_column = 1,
                .c_row = n,
                .input = a.x.dtype,
                .output = DType::kF32,
                .bias = false,
                .accumulate = a.accumulate};
  run_slices(ctx, key, [&](int64_t row) { return Operands{at(a.dy, row), a.x.data, at(a.dw, row * n), nullptr}; });
  if (is_given(a.db))
    add_column_sums(ctx, active_isa(), is_given(a.bias_dy) ? a.bias_dy : a.dy, static_cast<float*>(a.db.data));
}

}  // namespace

bool onednn_built() { return true; }
LinearKernels onednn_linear_kernels() { return {forward, backward_input, backward_weight}; }
int onednn_cached_primitives() { return cache().size(); }

}  // namespace concerto::cpu
