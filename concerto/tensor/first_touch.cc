#include "concerto/tensor/first_touch.h"

#include <algorithm>

namespace concerto {

// The smallest page there is: where pages are larger, the rest of a page's writes find it there.
constexpr int64_t kPage = 4096;

void first_touch(ThreadPool& pool, std::span<const Extent> extents) {
  pool.run([&](int part) {
    for (const Extent& e : extents) {
      const int64_t bytes = e.end - e.begin;
      char* const end = e.begin + bytes * (part + 1) / pool.size();
      char* p = std::max(e.begin + bytes * part / pool.size(), e.fresh);
      while (p < end) {
        *static_cast<volatile char*>(p) = 0;
        p += kPage - reinterpret_cast<intptr_t>(p) % kPage;
      }
    }
  });
}

}  // namespace concerto
