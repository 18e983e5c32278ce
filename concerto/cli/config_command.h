// `concerto config help [KEY] | check CONFIG | show CONFIG`: the settings explained, a file checked, a file resolved.
#pragma once

namespace CLI {
class App;
}

namespace concerto {

void add_config_command(CLI::App& app);

}  // namespace concerto
