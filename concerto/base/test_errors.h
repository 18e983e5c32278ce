// For tests: what an Error must say.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "concerto/base/error.h"

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

namespace concerto {

// The text of the Error that `call` throws; fails the test when it throws none or another code.
template <class F>
std::string error_of(ErrorCode code, F&& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(error_code_name(e.code), std::string(error_code_name(code))) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

// As above; every one of `parts` must stand in the text.
template <class F>
std::string expect_error(ErrorCode code, const std::vector<std::string>& parts, F&& call) {
  const std::string text = error_of(code, call);
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
  return text;
}

}  // namespace concerto
