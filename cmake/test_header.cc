// Owner of the precompiled header that all tests share (cmake/concerto.cmake).
#include <gtest/gtest.h>

TEST(TestHeader, IsCompiledOnce) { SUCCEED(); }
