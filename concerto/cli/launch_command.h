// `concerto launch`: one training run on many ranks.
#pragma once

namespace CLI {
class App;
}

namespace concerto {

void add_launch_command(CLI::App& app);

}  // namespace concerto
