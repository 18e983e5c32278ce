// The register tile of the instruction sets that multiply vectors, and its packing of A. Included by product_<isa>.cc
// after product_kernels_body.h and under its rules. Vec has besides:
//   type Sum (kLanes f32), type Words (kLanes words), zero, add, load, store, stream, store_bf16, load_words, broadcast,
//   multiply_add(sum, a, b); settle() after stream

template <class S>
void pack_a_rows(const void* a, int64_t stride, int64_t rows, int64_t k, uint32_t* packed, int64_t panel_words) {
  for (int64_t r = 0; r < rows; r += kRows, packed += panel_words)
    for (int64_t i = 0; i < k; i += kLanes * kUnit)
      for (int64_t v = 0; v < kRows && r + v < rows; v += kLanes)
        pack_block<S>(static_cast<const S*>(a) + (r + v) * stride + i, stride,
                      smaller(smaller(kLanes, kRows - v), rows - r - v), smaller(k - i, kLanes * kUnit),
                      packed + i / kUnit * kRows + v, kRows);
}

template <class S>
void pack_a_cols(const void* a, int64_t stride, int64_t rows, int64_t k, uint32_t* packed, int64_t panel_words) {
  pack_cols<S, kRows>(static_cast<const S*>(a), stride, rows, k, packed, panel_words);
}

struct TileOut {
  float* c;
  int64_t c_stride;
  void* out;
  int64_t out_stride;
  Finish finish;
  bool first;
};

constexpr int64_t kLine = 64;  // bytes
constexpr int kPanelLines = kColumns * 4 > kLine ? kColumns * 4 / kLine : 1;

template <int kCount, class Each>
inline void for_sums(Each each) {
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) each(i, v);
}

// A packed: a word of all rows, then the next.
struct PackedRows {
  const uint32_t* at;
  PackedRows(const char* a, int64_t) : at(reinterpret_cast<const uint32_t*>(a)) {}
  const void* row(int i) const { return at + i; }
  void next() { at += kRows; }
};

// A as it lies. A pointer to every third row, so that with the stride all rows are one address away and few registers
// are taken; the compiler would keep one for each.
struct StraightRows {
  static constexpr int kPointers = (kRows + 2) / 3;
  const char* third[kPointers];
  int64_t stride;
  StraightRows(const char* a, int64_t bytes) : stride(bytes) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) third[i] = a + 3 * i * bytes;
  }
  const void* row(int i) const { return third[i / 3] + i % 3 * stride; }
  void next() {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) {
      third[i] += 4;
      asm("" : "+r"(third[i]));
    }
  }
};

// kCount rows of A times one panel of B. What the sums meet at the end is fetched while the products run,
// and for every word kLines lines from `next` on, to the second cache level.
template <class Rows, int kCount, int kLines>
void tile_of(const char* a, int64_t a_stride, const uint32_t* b, const char* next, int64_t words, const TileOut& to) {
  Rows from(a, a_stride);
  typename Vec::Sum sum[kCount][kVectors];
  for_sums<kCount>([&](int i, int v) { sum[i][v] = Vec::zero(); });
  const bool to_c = to.finish == Finish::kKeep;
  const auto* meets = static_cast<const char*>(to_c ? to.c : to.out);
  const int64_t element = to.finish == Finish::kStoreBF16 ? 2 : 4,
                stride = (to_c ? to.c_stride : to.out_stride) * element;
  if (to.finish != Finish::kStreamF32)
    for (int64_t i = 0; i < kCount; ++i)
      for (int64_t j = 0; j < kColumns * element; j += 64) __builtin_prefetch(meets + i * stride + j, 1);

  for (int64_t w = 0; w < words; ++w) {
    typename Vec::Words column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = Vec::load_words(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const typename Vec::Words row = Vec::broadcast(from.row(i));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = Vec::multiply_add(sum[i][v], row, column[v]);
    }
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + line * kLine, 0, 2);
    next += kLines * kLine;
    from.next();
    b += kColumns;
  }

  const auto c = [&](int i, int v) { return to.c + i * to.c_stride + v * kLanes; };
  const auto out = [&](int i, int v) { return i * to.out_stride + v * kLanes; };
  if (!to.first) for_sums<kCount>([&](int i, int v) { sum[i][v] = Vec::add(Vec::load(c(i, v)), sum[i][v]); });
  switch (to.finish) {
    case Finish::kKeep:
      for_sums<kCount>([&](int i, int v) { Vec::store(c(i, v), sum[i][v]); });
      break;
    case Finish::kStoreF32:
      for_sums<kCount>([&](int i, int v) { Vec::store(static_cast<float*>(to.out) + out(i, v), sum[i][v]); });
      break;
    case Finish::kStreamF32:
      for_sums<kCount>([&](int i, int v) { Vec::stream(static_cast<float*>(to.out) + out(i, v), sum[i][v]); });
      break;
    case Finish::kStoreBF16:
      for_sums<kCount>([&](int i, int v) { Vec::store_bf16(static_cast<Bits16*>(to.out) + out(i, v), sum[i][v]); });
      break;
    case Finish::kAddF32:
      for_sums<kCount>([&](int i, int v) {
        float* p = static_cast<float*>(to.out) + out(i, v);
        Vec::store(p, Vec::add(Vec::load(p), sum[i][v]));
      });
      break;
  }
}

using TileFn = void (*)(const char*, int64_t, const uint32_t*, const char*, int64_t, const TileOut&);

template <class Rows, int kLines>
struct TileTable {
  TileFn of[kRows + 1] = {};
  template <int kCount>
  constexpr void fill() {
    of[kCount] = tile_of<Rows, kCount, kLines>;
    if constexpr (kCount > 1) fill<kCount - 1>();
  }
  constexpr TileTable() { fill<kRows>(); }
};

// Panels of kRows rows lie a_panel bytes apart.
template <class Rows>
void tiles(const char* a, int64_t a_panel, int64_t a_stride, const uint32_t* b, int64_t b_panel_words, float* c,
           int64_t c_stride, int64_t rows, int64_t panels, int64_t words, bool first, Finish finish, void* out,
           int64_t out_stride, Ahead* ahead) {
  static constexpr TileTable<Rows, 0> kPlain;
  static constexpr TileTable<Rows, 1> kWithRun;
  static constexpr TileTable<Rows, kPanelLines>
      kWithPanel;  // packed weights that fill more than the second cache level
  const int64_t element = finish == Finish::kStoreBF16 ? 2 : 4;
  for (int64_t j = 0; j < panels; ++j) {
    const uint32_t* b_panel = b + j * b_panel_words;
    const char* from = a;
    for (int64_t i = 0; i < rows; i += kRows, from += a_panel) {
      const TileOut to{c + i * c_stride + j * kColumns,
                       c_stride,
                       static_cast<char*>(out) + (i * out_stride + j * kColumns) * element,
                       out_stride,
                       finish,
                       first};
      const int64_t count = smaller(kRows, rows - i);
      fetch_some(ahead);
      if (ahead && ahead->run_bytes > 0) {
        kWithRun.of[count](from, a_stride, b_panel, ahead->run, words, to);
        const int64_t fetched = smaller(words * kLine, ahead->run_bytes);
        ahead->run += fetched;
        ahead->run_bytes -= fetched;
      } else if (i == 0) {
        kWithPanel.of[count](from, a_stride, b_panel, reinterpret_cast<const char*>(b_panel + b_panel_words), words,
                             to);
      } else {
        kPlain.of[count](from, a_stride, b_panel, nullptr, words, to);
      }
    }
  }
  if (finish == Finish::kStreamF32) Vec::settle();
}

void tile(const uint32_t* a, int64_t a_panel_words, const uint32_t* b, int64_t b_panel_words, float* c,
          int64_t c_stride, int64_t rows, int64_t panels, int64_t words, bool first, Finish finish, void* out,
          int64_t out_stride, Ahead* ahead) {
  tiles<PackedRows>(reinterpret_cast<const char*>(a), a_panel_words * 4, 0, b, b_panel_words, c, c_stride, rows, panels,
                    words, first, finish, out, out_stride, ahead);
}

void tile_rows(const char* a, int64_t a_stride, const uint32_t* b, int64_t b_panel_words, float* c, int64_t c_stride,
               int64_t rows, int64_t panels, int64_t words, bool first, Finish finish, void* out, int64_t out_stride,
               Ahead* ahead) {
  tiles<StraightRows>(a, kRows * a_stride, a_stride, b, b_panel_words, c, c_stride, rows, panels, words, first, finish,
                      out, out_stride, ahead);
}

constexpr ProductKernels make_table() {
  ProductKernels t = shared_table();
  t.pack_a_rows[kSourceBF16] = pack_a_rows<Bits16>;
  t.pack_a_cols[kSourceBF16] = pack_a_cols<Bits16>;
  if constexpr (kUnit == 1) {
    t.pack_a_rows[kSourceF32] = pack_a_rows<Bits32>;
    t.pack_a_cols[kSourceF32] = pack_a_cols<Bits32>;
  }
  t.tile = tile;
  t.tile_rows = tile_rows;
  return t;
}
