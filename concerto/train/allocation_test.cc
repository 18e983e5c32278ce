// A steady step's monitoring allocates nothing; and the guard that shows it counts.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

#include "concerto/base/allocation_guard.h"
#include "concerto/base/test_folder.h"
#include "concerto/train/load_file.h"
#include "concerto/train/memory_report.h"
#include "concerto/train/metrics.h"
#include "concerto/train/progress.h"
#include "concerto/train/tensorboard.h"
#include "concerto/train/trace_writer.h"

namespace concerto {
namespace {

struct alignas(64) Line {
  char c[64];
};
void* volatile sink;  // keeps the compiler from leaving an allocation out

TEST(AllocationGuard, CountsTheWatchedThreadOnly) {
  AllocationGuard::reset();
  sink = ::operator new(4);
  ::operator delete(sink);
  EXPECT_EQ(AllocationGuard::count(), 0);
  EXPECT_EQ(AllocationGuard::first_stack(), "");
  {
    const AllocationGuard guard;
    sink = ::operator new(4);
    ::operator delete(sink);
    double* const array = new double[100];
    sink = array;
    delete[] array;
    Line* const line = new Line();
    sink = line;
    delete line;
  }
  EXPECT_EQ(AllocationGuard::count(), 3);
  EXPECT_EQ(AllocationGuard::bytes(), static_cast<int64_t>(4 + 100 * sizeof(double) + sizeof(Line)));
  EXPECT_NE(AllocationGuard::first_stack(), "");
  std::thread([] {
    sink = ::operator new(4);
    ::operator delete(sink);
  }).join();
  EXPECT_EQ(AllocationGuard::count(), 3);
}

TEST(Monitor, SteadyStepAllocatesNothing) {
  const TestFolder folder;
  const int null = ::open("/dev/null", O_WRONLY);
  ASSERT_GE(null, 0);
  MetricsWriter metrics(folder / "metrics.jsonl", 0);
  EventWriter events(folder.path(), 0);
  Progress live({.fd = null, .style = {.live = true, .color = true, .unicode = true}});
  Progress plain({.fd = null, .style = {}});
  TraceWriter trace(folder / "trace.json", 1, 1000000, 1 << 12);
  StepReport r;
  LoadHead head{.layers = {}, .experts = 64};
  for (int64_t layer = 0; layer < 28; ++layer) head.layers.push_back(layer);
  LoadWriter loads(folder / "expert_load.bin", head, 0);
  LoadWatch watch({.steps = 100, .starving_below = 0.01, .collapsed_below = 0.1, .experts_per_token = 6});
  r.steps = 100000;
  r.mtp_losses = {7.123456789};
  for (int64_t layer = 0; layer < 28; ++layer) {
    r.moe_layers.push_back(layer);
    r.tokens_per_expert.emplace_back(64, 100 + layer);
    r.dropped_per_expert.emplace_back(64, layer);
    r.correction_bias.emplace_back(64, 1.0 / static_cast<double>(3 + layer));
  }
  const auto step = [&] {
    trace.begin_step(++r.step);
    {
      const TraceScope scope(&trace, "forward of a long-named segment", "compute", 3, 1);
      r.loss = 10.0 / static_cast<double>(r.step);
      r.grad_norm = 1.0 / 3.0;
      r.tokens_per_s = 123456.789 * static_cast<double>(r.step);
      r.peak_bytes = read_process_memory().peak_bytes;
      summarize_loads(r);
      metrics.write(r);
      loads.write(r);
      watch.step(r.step, r.moe_layers, r.tokens_per_expert, r.layer_loads);
      events.write(r);
      live.step(r);
      plain.step(r);
    }
    trace.end_step();
  };
  for (int i = 0; i < 2 * EventWriter::kHistogramSteps; ++i) step();
  AllocationGuard::reset();
  {
    const AllocationGuard guard;
    for (int i = 0; i < 200; ++i) step();
  }
  EXPECT_EQ(AllocationGuard::count(), 0) << AllocationGuard::first_stack();
  ::close(null);
}

}  // namespace
}  // namespace concerto
