// `concerto generate --model DIR --prompt TEXT`: continue a text, word by word as it is made.
#pragma once

namespace CLI {
class App;
}

namespace concerto {
void add_generate_command(CLI::App& app);
}  // namespace concerto
