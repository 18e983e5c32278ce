// The processor's tiles (tile.h). Assembly and not <immintrin.h>: register numbers are template arguments here and must
// be literals there, and GCC's intrinsics do not tell the compiler that they touch memory (GCC bug 114098).

inline void tile_configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }

inline TileConfig tile_configuration() {
  TileConfig config;
  __asm__ volatile("sttilecfg %0" : "=m"(config));
  return config;
}

template <int kTile>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
inline void tile_load(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void tile_store(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kC, int kA, int kB>
inline void tile_multiply_add() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
