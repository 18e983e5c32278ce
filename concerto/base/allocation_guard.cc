#include "concerto/base/allocation_guard.h"

#include <execinfo.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace concerto {
namespace {

constexpr int kFrames = 32;
std::atomic<int64_t> counted{0}, counted_bytes{0};
std::atomic<int> stack_size{0};
void* stack[kFrames];
thread_local bool watched = false;

void note(size_t bytes) {
  if (!watched) return;
  counted_bytes.fetch_add(static_cast<int64_t>(bytes));
  if (counted.fetch_add(1) == 0) {
    watched = false;  // backtrace() itself may allocate
    stack_size.store(::backtrace(stack, kFrames));
    watched = true;
  }
}

void* allocate(size_t bytes, size_t alignment) {
  note(bytes);
  if (bytes == 0) bytes = 1;
  void* p = alignment <= alignof(std::max_align_t)
                ? std::malloc(bytes)
                : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  return p;
}

void* allocate_or_throw(size_t bytes, size_t alignment) {
  void* p = allocate(bytes, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

AllocationGuard::AllocationGuard() { watched = true; }
AllocationGuard::~AllocationGuard() { watched = false; }

void AllocationGuard::reset() {
  counted.store(0);
  counted_bytes.store(0);
  stack_size.store(0);
}
int64_t AllocationGuard::count() { return counted.load(); }
int64_t AllocationGuard::bytes() { return counted_bytes.load(); }

std::string AllocationGuard::first_stack() {
  const int size = stack_size.load();
  if (size == 0) return {};
  const bool was = watched;
  watched = false;
  std::string text;
  if (char** lines = ::backtrace_symbols(stack, size)) {
    for (int i = 0; i < size; ++i) text.append(lines[i]).push_back('\n');
    std::free(lines);
  }
  watched = was;
  return text;
}

}  // namespace concerto

void* operator new(size_t bytes) { return concerto::allocate_or_throw(bytes, 0); }
void* operator new[](size_t bytes) { return concerto::allocate_or_throw(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t a) {
  return concerto::allocate_or_throw(bytes, static_cast<size_t>(a));
}
void* operator new[](size_t bytes, std::align_val_t a) {
  return concerto::allocate_or_throw(bytes, static_cast<size_t>(a));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return concerto::allocate(bytes, 0); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return concerto::allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t a, const std::nothrow_t&) noexcept {
  return concerto::allocate(bytes, static_cast<size_t>(a));
}
void* operator new[](size_t bytes, std::align_val_t a, const std::nothrow_t&) noexcept {
  return concerto::allocate(bytes, static_cast<size_t>(a));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t, const std::nothrow_t&) noexcept { std::free(p); }
