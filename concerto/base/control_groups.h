// The control groups of Linux that a process is in: what containers and batch systems set their limits with.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace concerto {

// f(dir, version1) for the process's group of `controller` ("memory", "cpu") and those above it, `dir` being its folder
// with a '/' at the end. The two versions of control groups may be in use side by side. `root` stands before /proc and
// /sys: tests make up their own.
void for_each_control_group(const std::string& root, std::string_view controller,
                            const std::function<void(const std::string& dir, bool version1)>& f);

// The beginning of a file of /proc or /sys, in `text`; empty if there is none. Allocates nothing.
std::string_view read_kernel_file(const char* path, std::span<char> text);

}  // namespace concerto
