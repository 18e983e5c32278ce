#include <gtest/gtest.h>

#include "concerto/comm/communicator.h"

namespace concerto {
namespace {

TEST(CommScope, NamesTheInnermostAction) {
  EXPECT_EQ(CommScope::text(), "");
  {
    const CommScope step("forward", 5);
    EXPECT_EQ(CommScope::text(), "forward, micro-batch 5");
    {
      const CommScope inner("dispatch", -1, 3);
      EXPECT_EQ(CommScope::text(), "dispatch of layer 3, micro-batch 5, in forward");
    }
    EXPECT_EQ(CommScope::text(), "forward, micro-batch 5");
  }
  EXPECT_EQ(CommScope::text(), "");
  const CommScope alone("dispatch", 5, 3);
  EXPECT_EQ(CommScope::text(), "dispatch of layer 3, micro-batch 5");
}

}  // namespace
}  // namespace concerto
