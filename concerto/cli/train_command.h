// `concerto train CONFIG [--section.key=value]...`: train, then say what was learnt.
#pragma once

namespace CLI {
class App;
}

namespace concerto {
void add_train_command(CLI::App& app);
}  // namespace concerto
