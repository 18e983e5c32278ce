// For tests: counts the calls of operator new on chosen threads, to show that a steady step makes none. Link
// concerto_allocation_guard; it replaces the global operator new, so it is never part of the product.
#pragma once

#include <cstdint>
#include <string>

namespace concerto {

class AllocationGuard {
 public:
  // Counts the calling thread from here on, until the guard dies; one a thread at a time.
  AllocationGuard();
  ~AllocationGuard();
  AllocationGuard(const AllocationGuard&) = delete;
  AllocationGuard& operator=(const AllocationGuard&) = delete;

  // Sums over all watched threads since reset(), which no watched thread should outrun.
  static void reset();
  static int64_t count();
  static int64_t bytes();
  // The call stack of the first counted allocation, one frame a line; empty if there was none. For the message of a
  // failing test.
  static std::string first_stack();
};

}  // namespace concerto
