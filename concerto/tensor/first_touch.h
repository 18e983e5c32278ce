// Memory comes into being when it is first written to: the system takes a page on the node (NUMA) of the thread that
// writes, and zeroes it. Here the pool's threads do that before the first step, each for the part that it will work on.
#pragma once

#include <cstdint>
#include <span>

#include "concerto/base/thread_pool.h"

namespace concerto {

// Memory in use as one array that the pool's parts share evenly, [begin, end). What is before `fresh` has been touched.
struct Extent {
  char* begin = nullptr;
  char* end = nullptr;
  char* fresh = nullptr;
};

// Writes a zero to every page of [fresh, end), in the thread whose part it is when [begin, end) is cut evenly. For
// memory without contents only.
void first_touch(ThreadPool& pool, std::span<const Extent> extents);

}  // namespace concerto
