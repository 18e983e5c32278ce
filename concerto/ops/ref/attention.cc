#include <algorithm>
#include <limits>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

template <class C>
double dot(const C* a, const C* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += load(a[i]) * load(b[i]);
  return sum;
}

// The document that holds a token: [begin, end).
struct Range {
  int64_t begin, end;
};
Range document_of(const View& offsets, int64_t token) {
  const auto* begin = offsets.as<int32_t>();
  const auto* next = std::upper_bound(begin, begin + offsets.dim(0), static_cast<int32_t>(token));
  return {next[-1], next[0]};
}

// One query row and head against rows [first, last] of k and v; scores holds last - first + 1 values. Returns
// log(sum(exp)).
template <class C>
double attend(const C* q, const View& k, const View& v, int64_t first, int64_t last, int64_t column, int64_t dim,
              double scale, double* scores, C* out) {
  double highest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t j = first; j <= last; ++j) {
    scores[j - first] = scale * dot(q, row_of<C>(k, j) + column, dim);
    highest = std::max(highest, scores[j - first]);
  }
  for (int64_t j = first; j <= last; ++j) sum += scores[j - first] = std::exp(scores[j - first] - highest);
  for (int64_t d = 0; d < dim; ++d) {
    double value = 0;
    for (int64_t j = first; j <= last; ++j) value += scores[j - first] * load(row_of<C>(v, j)[column + d]);
    store(out[d], value / sum);
  }
  return highest + std::log(sum);
}

void forward(const Context& ctx, const AttentionForward& a) {
  ArenaScope arena(*ctx.scratch);
  const int64_t rows = a.q.dim(0), dim = a.head_dim, group = a.num_heads / a.num_kv_heads;
  const View scores = ctx.scratch->take({ctx.pool->size(), rows}, DType::kF64);
  if (ctx.dry_run) return;
  check_offsets(a.doc_offsets, rows, true);
  with_types(a.q.dtype, [&]<class C, class S>() {
    for_rows(ctx, rows, [&](int64_t t, int thread) {
      const int64_t first = document_of(a.doc_offsets, t).begin;
      for (int64_t n = 0; n < a.num_heads; ++n)
        store(row_of<S>(a.lse, t)[n], attend(row_of<C>(a.q, t) + n * dim, a.k, a.v, first, t, n / group * dim, dim,
                                             a.scale, row_of<double>(scores, thread), row_of<C>(a.out, t) + n * dim));
    });
  });
}

void cached(const Context& ctx, const AttentionCached& a) {
  ArenaScope arena(*ctx.scratch);
  const int64_t rows = a.q.dim(0), dim = a.head_dim, group = a.num_heads / a.num_kv_heads;
  const View scores = ctx.scratch->take({ctx.pool->size(), a.past + rows}, DType::kF64);
  if (ctx.dry_run) return;
  with_types(a.q.dtype, [&]<class C, class S>() {
    for_rows(ctx, rows, [&](int64_t t, int thread) {
      for (int64_t n = 0; n < a.num_heads; ++n)
        attend(row_of<C>(a.q, t) + n * dim, a.k_cache, a.v_cache, 0, a.past + t, n / group * dim, dim, a.scale,
               row_of<double>(scores, thread), row_of<C>(a.out, t) + n * dim);
    });
  });
}

// p = exp(scale q k - lse), ds = p (dout v - dout out): dq = scale ds k, dk = scale ds q, dv = p dout.
template <class C, class S>
struct Gradients {
  const AttentionBackward& a;
  const int64_t dim = a.head_dim, group = a.num_heads / a.num_kv_heads;

  double prob(int64_t i, int64_t j, int64_t n) const {
    return std::exp(a.scale * dot(row_of<C>(a.q, i) + n * dim, row_of<C>(a.k, j) + n / group * dim, dim) -
                    load(row_of<S>(a.lse, i)[n]));
  }
  double dscore(int64_t i, int64_t j, int64_t n, double p) const {
    const C* dout = row_of<C>(a.dout, i) + n * dim;
    return p * (dot(dout, row_of<C>(a.v, j) + n / group * dim, dim) - dot(dout, row_of<C>(a.out, i) + n * dim, dim));
  }
  void query_row(int64_t i, double* sum) const {
    const int64_t first = document_of(a.doc_offsets, i).begin;
    for (int64_t n = 0; n < a.num_heads; ++n) {
      std::fill(sum, sum + dim, 0.0);
      for (int64_t j = first; j <= i; ++j) {
        const double ds = a.scale * dscore(i, j, n, prob(i, j, n));
        for (int64_t d = 0; d < dim; ++d) sum[d] += ds * load(row_of<C>(a.k, j)[n / group * dim + d]);
      }
      for (int64_t d = 0; d < dim; ++d) store(row_of<C>(a.dq, i)[n * dim + d], sum[d]);
    }
  }
  void key_row(int64_t j, double* sum) const {
    const int64_t last = document_of(a.doc_offsets, j).end;
    double *dk = sum, *dv = sum + dim;
    for (int64_t g = 0; g < a.num_kv_heads; ++g) {
      std::fill(sum, sum + 2 * dim, 0.0);
      for (int64_t n = g * group; n < (g + 1) * group; ++n)
        for (int64_t i = j; i < last; ++i) {
          const double p = prob(i, j, n), ds = a.scale * dscore(i, j, n, p);
          for (int64_t d = 0; d < dim; ++d) {
            dk[d] += ds * load(row_of<C>(a.q, i)[n * dim + d]);
            dv[d] += p * load(row_of<C>(a.dout, i)[n * dim + d]);
          }
        }
      for (int64_t d = 0; d < dim; ++d) {
        store(row_of<C>(a.dk, j)[g * dim + d], dk[d]);
        store(row_of<C>(a.dv, j)[g * dim + d], dv[d]);
      }
    }
  }
};

void backward(const Context& ctx, const AttentionBackward& a) {
  ArenaScope arena(*ctx.scratch);
  const int64_t rows = a.q.dim(0);
  const View sums = ctx.scratch->take({ctx.pool->size(), 2 * a.head_dim}, DType::kF64);
  if (ctx.dry_run) return;
  check_offsets(a.doc_offsets, rows, true);
  with_types(a.q.dtype, [&]<class C, class S>() {
    const Gradients<C, S> gradients{a};
    for_rows(ctx, rows, [&](int64_t t, int thread) {
      gradients.query_row(t, row_of<double>(sums, thread));
      gradients.key_row(t, row_of<double>(sums, thread));
    });
  });
}

}  // namespace

AttentionKernels attention() { return {.forward = forward, .backward = backward, .cached = cached}; }

}  // namespace concerto::ref
