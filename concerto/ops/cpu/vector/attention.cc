// Drivers of attention: which thread takes which rows of which document. Results never depend on that: every sum is
// taken in the order of blocks, counted from the document's start.
#include <algorithm>
#include <numeric>

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

// The documents of a batch, longest first, cut into blocks of rows.
class Documents {
 public:
  // Takes its memory from scratch; reads nothing yet.
  Documents(const Context& ctx, const View& offsets)
      : count_(offsets.dim(0) - 1),
        order_view_(ctx.scratch->take({count_}, DType::kI32)),
        first_view_(ctx.scratch->take({count_ + 1}, DType::kI64)) {}

  void sort(const View& offsets, int64_t block) {
    offsets_ = offsets.as<int32_t>();
    order_ = order_view_.as<int32_t>();
    first_ = first_view_.as<int64_t>();
    std::iota(order_, order_ + count_, 0);
    std::sort(order_, order_ + count_,
              [&](int32_t a, int32_t b) { return length(a) != length(b) ? length(a) > length(b) : a < b; });
    cut(block);
  }
  void cut(int64_t block) {
    first_[0] = 0;
    for (int64_t i = 0; i < count_; ++i) first_[i + 1] = first_[i] + blocks_of(length(order_[i]), block);
  }

  int64_t count() const { return count_; }
  int64_t blocks() const { return first_[count_]; }
  int64_t begin(int64_t document) const { return offsets_[document]; }
  int64_t length(int64_t document) const { return offsets_[document + 1] - offsets_[document]; }
  int64_t nth(int64_t i) const { return order_[i]; }

  // Item i of blocks() * heads: longest document first, the blocks of a head together, so that they share its keys in
  // the cache.
  struct Item {
    int64_t document, head, block, blocks;
  };
  Item item(int64_t i, int64_t heads) const {
    const int64_t at = std::upper_bound(first_, first_ + count_ + 1, i / heads) - first_ - 1;
    const int64_t blocks = first_[at + 1] - first_[at], local = i - first_[at] * heads;
    return {order_[at], local / blocks, local % blocks, blocks};
  }

  // Where a document's keys start among the packed keys of a head: each has room to be filled up to a whole group.
  int64_t packed_begin(int64_t document) const { return kKeyGroup * (begin(document) / kKeyGroup + document); }
  int64_t packed_keys(int64_t tokens) const { return kKeyGroup * (tokens / kKeyGroup + count_ + 1); }

 private:
  int64_t count_;
  View order_view_, first_view_;
  const int32_t* offsets_ = nullptr;
  int32_t* order_ = nullptr;
  int64_t* first_ = nullptr;
};

int64_t filled_up(int64_t keys) { return blocks_of(keys, kKeyGroup) * kKeyGroup; }

// Packed keys and values of all documents: [num_kv_heads][packed keys] of `unit` bytes a key.
struct PackedKeys {
  char *k_by_dim = nullptr, *k_by_key = nullptr, *v_by_dim = nullptr, *v_by_key = nullptr;
  int64_t unit = 0, keys = 0;

  AttentionTable::Packs at(int64_t head, int64_t key) const {
    const int64_t offset = (head * keys + key) * unit;
    const auto moved = [&](char* p) { return p ? p + offset : nullptr; };
    return {moved(k_by_dim), moved(k_by_key), moved(v_by_dim), moved(v_by_key)};
  }
};

template <Isa isa>
struct Attention {
  static const AttentionTable& table(const View& q) { return kernel_table(isa).attention[type_index(q.dtype)]; }

  template <class Args>
  static void pack(const Context& ctx, const Args& a, Documents& documents, const PackedKeys& packed, char* work,
                   int64_t work_bytes) {
    const AttentionTable& t = table(a.q);
    const Rows k(a.k), v(a.v);
    documents.cut(t.key_block);
    ctx.pool->parallel_dynamic(documents.blocks() * a.num_kv_heads, [&](int64_t i, int thread) {
      const auto [document, head, block, blocks] = documents.item(i, a.num_kv_heads);
      const int64_t key = block * t.key_block, keys = std::min(t.key_block, documents.length(document) - key);
      const int64_t row = documents.begin(document) + key;
      t.pack_block(k.at(row, head * a.head_dim), a.k.row_stride, v.at(row, head * a.head_dim), a.v.row_stride, keys,
                   filled_up(keys), a.head_dim, packed.at(head, documents.packed_begin(document) + key),
                   work + thread * work_bytes);
    });
  }

  static void forward(const Context& ctx, const AttentionForward& a) {
    const AttentionTable& t = table(a.q);
    const int64_t tokens = a.q.rows(), dim = a.head_dim, group = a.num_heads / a.num_kv_heads;
    const int64_t work_bytes = align_up(t.work_bytes(dim));
    ArenaScope scope(*ctx.scratch);
    Documents documents(ctx, a.doc_offsets);
    PackedKeys packed{.unit = padded_dim(dim) * t.element_bytes, .keys = documents.packed_keys(tokens)};
    packed.k_by_dim = static_cast<char*>(ctx.scratch->take_bytes(a.num_kv_heads * packed.keys * packed.unit));
    packed.v_by_key = static_cast<char*>(ctx.scratch->take_bytes(a.num_kv_heads * packed.keys * packed.unit));
    char* work = static_cast<char*>(ctx.scratch->take_bytes(ctx.pool->size() * work_bytes));
    if (ctx.dry_run) return;
    documents.sort(a.doc_offsets, t.key_block);
    pack(ctx, a, documents, packed, work, work_bytes);

    const Rows q(a.q), out(a.out), lse(a.lse);
    documents.cut(t.forward_queries);
    ctx.pool->parallel_dynamic(documents.blocks() * a.num_heads, [&](int64_t i, int thread) {
      const auto [document, head, nth, blocks] = documents.item(i, a.num_heads);
      const int64_t begin = (blocks - 1 - nth) * t.forward_queries;  // late rows see most keys: first
      const int64_t length = documents.length(document), row = documents.begin(document) + begin;
      t.forward(q.at(row, head * dim), a.q.row_stride, begin, std::min(t.forward_queries, length - begin), length, dim,
                static_cast<float>(a.scale), packed.at(head / group, documents.packed_begin(document)),
                out.at(row, head * dim), a.out.row_stride, reinterpret_cast<float*>(lse.at(row, head)),
                a.lse.row_stride, work + thread * work_bytes);
    });
  }

  // Everything that the parts of the backward pass share.
  struct Backward {
    const Context& ctx;
    const AttentionBackward& a;
    const AttentionTable& t;
    Documents& documents;
    PackedKeys packed;
    float *dk_sums, *dv_sums, *delta;  // [num_kv_heads][packed keys * head_dim] twice, [T, N]
    char* work;
    int64_t work_bytes;
    int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim;
    float scale = static_cast<float>(a.scale);

    void load(int64_t document, int64_t head, int64_t begin, int64_t rows, void* memory) const {
      const int64_t row = documents.begin(document) + begin;
      const Rows q(a.q), dout(a.dout), lse(a.lse);
      t.load_queries(q.at(row, head * dim), a.q.row_stride, dout.at(row, head * dim), a.dout.row_stride,
                     reinterpret_cast<const float*>(lse.at(row, head)), a.lse.row_stride,
                     delta + row * a.num_heads + head, a.num_heads, rows, dim, memory);
    }
    float* sums_at(float* sums, int64_t kv_head, int64_t packed_key) const {
      return sums + (kv_head * packed.keys + packed_key) * dim;
    }
    // Query block against key block.
    void meet(int64_t document, int64_t kv_head, int64_t begin, int64_t rows, int64_t block, bool want_dkv,
              bool want_dq, void* memory) const {
      const int64_t key = block * t.key_block, at = documents.packed_begin(document) + key;
      const int64_t width = filled_up(std::min(t.key_block, documents.length(document) - key));
      t.meet(begin, rows, key, width, dim, scale, packed.at(kv_head, at),
             want_dkv ? sums_at(dk_sums, kv_head, at) : nullptr, want_dkv ? sums_at(dv_sums, kv_head, at) : nullptr,
             want_dq, memory);
    }
    void store_dq(int64_t document, int64_t head, int64_t begin, int64_t rows, void* memory) const {
      t.store_dq(rows, dim, Rows(a.dq).at(documents.begin(document) + begin, head * dim), a.dq.row_stride, memory);
    }
    void clear_sums(int64_t document, int64_t kv_head, int64_t block) const {
      const int64_t key = block * t.key_block, at = documents.packed_begin(document) + key;
      const int64_t width = filled_up(std::min(t.key_block, documents.length(document) - key));
      std::fill_n(sums_at(dk_sums, kv_head, at), width * dim, 0.0f);
      std::fill_n(sums_at(dv_sums, kv_head, at), width * dim, 0.0f);
    }
    void store_dkv(int64_t document, int64_t kv_head, int64_t block) const {
      const int64_t key = block * t.key_block, at = documents.packed_begin(document) + key;
      const int64_t keys = std::min(t.key_block, documents.length(document) - key);
      const int64_t row = documents.begin(document) + key;
      t.store_transposed(sums_at(dk_sums, kv_head, at), keys, filled_up(keys), dim, Rows(a.dk).at(row, kv_head * dim),
                         a.dk.row_stride);
      t.store_transposed(sums_at(dv_sums, kv_head, at), keys, filled_up(keys), dim, Rows(a.dv).at(row, kv_head * dim),
                         a.dv.row_stride);
    }

    // One thread has all of a document's KV head: five products a pair of blocks.
    void by_document() const {
      ctx.pool->parallel_dynamic(documents.count() * a.num_kv_heads, [&](int64_t i, int thread) {
        const int64_t document = documents.nth(i / a.num_kv_heads), kv_head = i % a.num_kv_heads;
        const int64_t length = documents.length(document), blocks = blocks_of(length, t.key_block);
        void* memory = work + thread * work_bytes;
        for (int64_t b = 0; b < blocks; ++b) clear_sums(document, kv_head, b);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
          for (int64_t begin = 0; begin < length; begin += t.backward_queries) {
            const int64_t rows = std::min(t.backward_queries, length - begin);
            load(document, head, begin, rows, memory);
            for (int64_t b = 0; b * t.key_block < begin + rows; ++b)
              meet(document, kv_head, begin, rows, b, true, true, memory);
            store_dq(document, head, begin, rows, memory);
          }
        for (int64_t b = 0; b < blocks; ++b) store_dkv(document, kv_head, b);
      });
    }

    // More pieces than documents and heads: key blocks for dk and dv, then query blocks for dq, which makes scores
    // twice (seven products). The same sums in the same order.
    void by_block() const {
      documents.cut(t.key_block);
      ctx.pool->parallel_dynamic(documents.blocks() * a.num_kv_heads, [&](int64_t i, int thread) {
        const auto [document, kv_head, block, blocks] = documents.item(i, a.num_kv_heads);
        const int64_t length = documents.length(document), first = block * t.key_block / t.backward_queries;
        void* memory = work + thread * work_bytes;
        clear_sums(document, kv_head, block);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
          for (int64_t begin = first * t.backward_queries; begin < length; begin += t.backward_queries) {
            const int64_t rows = std::min(t.backward_queries, length - begin);
            load(document, head, begin, rows, memory);
            meet(document, kv_head, begin, rows, block, true, false, memory);
          }
        store_dkv(document, kv_head, block);
      });
      documents.cut(t.backward_queries);
      ctx.pool->parallel_dynamic(documents.blocks() * a.num_heads, [&](int64_t i, int thread) {
        const auto [document, head, nth, blocks] = documents.item(i, a.num_heads);
        const int64_t begin = (blocks - 1 - nth) * t.backward_queries;
        const int64_t rows = std::min(t.backward_queries, documents.length(document) - begin);
        void* memory = work + thread * work_bytes;
        load(document, head, begin, rows, memory);
        for (int64_t b = 0; b * t.key_block < begin + rows; ++b)
          meet(document, head / group, begin, rows, b, false, true, memory);
        store_dq(document, head, begin, rows, memory);
      });
    }

    // Whether whole documents keep all threads busy well enough: Graham's bound on the makespan against the even split
    // of 7/5 of the work.
    bool documents_suffice() const {
      double all = 0, largest = 0;
      for (int64_t d = 0; d < documents.count(); ++d) {
        const double cost = static_cast<double>(documents.length(d)) * static_cast<double>(documents.length(d));
        all += cost * static_cast<double>(a.num_kv_heads);
        largest = std::max(largest, cost);
      }
      const double threads = ctx.pool->size();
      return all / threads + largest * (1 - 1 / threads) <= 1.4 * all / threads;
    }
  };

  static void backward(const Context& ctx, const AttentionBackward& a) {
    const AttentionTable& t = table(a.q);
    const int64_t tokens = a.q.rows(), dim = a.head_dim;
    const int64_t work_bytes = align_up(t.work_bytes(dim));
    ArenaScope scope(*ctx.scratch);
    Documents documents(ctx, a.doc_offsets);
    PackedKeys packed{.unit = padded_dim(dim) * t.element_bytes, .keys = documents.packed_keys(tokens)};
    for (char** p : {&packed.k_by_dim, &packed.k_by_key, &packed.v_by_dim})
      *p = static_cast<char*>(ctx.scratch->take_bytes(a.num_kv_heads * packed.keys * packed.unit));
    const View dk_sums = ctx.scratch->take({a.num_kv_heads, packed.keys, dim}, DType::kF32);
    const View dv_sums = ctx.scratch->take({a.num_kv_heads, packed.keys, dim}, DType::kF32);
    const View delta = ctx.scratch->take({tokens, a.num_heads}, DType::kF32);
    char* work = static_cast<char*>(ctx.scratch->take_bytes(ctx.pool->size() * work_bytes));
    if (ctx.dry_run) return;
    documents.sort(a.doc_offsets, t.key_block);
    pack(ctx, a, documents, packed, work, work_bytes);

    const Rows dout(a.dout), out(a.out);
    float* delta_data = delta.as<float>();
    ctx.pool->parallel_for(tokens, grain_rows(a.q.cols() * dout.element * 2), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r)
        for (int64_t h = 0; h < a.num_heads; ++h)
          delta_data[r * a.num_heads + h] = t.dot(dout.at(r, h * dim), out.at(r, h * dim), dim);
    });

    const Backward pass{.ctx = ctx,
                        .a = a,
                        .t = t,
                        .documents = documents,
                        .packed = packed,
                        .dk_sums = dk_sums.as<float>(),
                        .dv_sums = dv_sums.as<float>(),
                        .delta = delta_data,
                        .work = work,
                        .work_bytes = work_bytes};
    if (pass.documents_suffice())
      pass.by_document();
    else
      pass.by_block();
  }

  static void cached(const Context& ctx, const AttentionCached& a) {
    const AttentionTable& t = table(a.q);
    const int64_t dim = a.head_dim, rows = a.q.rows(), group = a.num_heads / a.num_kv_heads;
    const int64_t work_bytes = align_up(t.work_bytes(dim));
    ArenaScope scope(*ctx.scratch);
    char* work = static_cast<char*>(ctx.scratch->take_bytes(ctx.pool->size() * work_bytes));
    if (ctx.dry_run) return;
    const Rows q(a.q), k(a.k_cache), v(a.v_cache), out(a.out);
    ctx.pool->parallel_dynamic(rows * a.num_heads, [&](int64_t i, int thread) {
      const int64_t head = i / rows, row = rows - 1 - i % rows, column = head / group * dim;
      t.cached(q.at(row, head * dim), k.at(0, column), a.k_cache.row_stride, v.at(0, column), a.v_cache.row_stride,
               a.past + row + 1, dim, static_cast<float>(a.scale), out.at(row, head * dim), work + thread * work_bytes);
    });
  }

  static void fill(Backend& b) { b.attention = {forward, backward, cached}; }
};

}  // namespace

void fill_attention(Backend& backend, Isa isa) { fill_for<Attention>(backend, isa); }

}  // namespace concerto::cpu
