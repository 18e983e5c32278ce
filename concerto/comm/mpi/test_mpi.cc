#include "concerto/comm/mpi/test_mpi.h"

#include <gtest/gtest.h>

#include <memory>

namespace concerto {

static std::unique_ptr<MpiWorld> world;

MpiWorld& test_world() { return *world; }

}  // namespace concerto

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  concerto::world = std::make_unique<concerto::MpiWorld>();
  if (concerto::world->communicator().rank() != 0) {  // one rank tells of successes, all of failures
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    class Failures : public testing::EmptyTestEventListener {
      void OnTestPartResult(const testing::TestPartResult& result) override {
        if (result.failed())
          std::fprintf(stderr, "rank %d: %s:%d: %s\n", concerto::world->communicator().rank(),
                       result.file_name() ? result.file_name() : "", result.line_number(), result.message());
      }
    };
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new Failures);
  }
  const int result = RUN_ALL_TESTS();
  concerto::world.reset();
  return result;
}
