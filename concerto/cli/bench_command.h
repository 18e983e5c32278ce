// `concerto bench step`: the speed of a training step, its parts and its memory, beside a rival.
#pragma once

namespace CLI {
class App;
}

namespace concerto {
void add_bench_command(CLI::App& app);
}  // namespace concerto
