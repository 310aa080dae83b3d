// The two functions that a host looks up in the plug-in's file, and the registration that it gets.
#include "registration.hpp"

#include <cstdlib>
#include <cstring>

#include "tables.hpp"
#include "tables_0_10.hpp"
#include "tables_0_9.hpp"

namespace nvb_ggml {
namespace {

const char* registration_name(Registration*) {
  return "NVB";
}

size_t device_count(Registration* registration) {
  return static_cast<Plugin*>(registration->context)->entries.size();
}

Device* device_at(Registration* registration, size_t index) {
  Plugin& plugin = *static_cast<Plugin*>(registration->context);
  return index < plugin.entries.size() ? &plugin.entries[index]->device : nullptr;
}

Feature* features(Registration*) {
  static const std::string architectures = [] {
    nvb_build_info info;
    nvb_build_info_init(&info);
    return std::string(nvb_get_build_info(&info) == NVB_OK && info.cuda != 0 ? info.architectures : "none");
  }();
  static Feature list[] = {
      {"NVBACKEND", nvb_version_string()},
      {"CUDA_ARCHITECTURES", architectures.c_str()},
      {nullptr, nullptr},
  };
  return list;
}

void* function_named(Registration*, const char* name) {
  if (std::strcmp(name, "ggml_backend_get_features") == 0) return reinterpret_cast<void*>(&features);
  return nullptr;
}

template <class Tables>
void fill(Plugin& plugin) {
  for (const auto& entry : plugin.entries) {
    entry->device = {Interface<Tables>::device_functions(), &plugin.registration, entry->state.get()};
    entry->buffer_type = {Interface<Tables>::buffer_type_functions(), &entry->device, nullptr};
    entry->host_buffer_type = {Interface<Tables>::host_buffer_type_functions(), &entry->device, nullptr};
  }
}

void add_device(Plugin& plugin, const std::string& selector) {
  std::string name = "NVB" + std::to_string(plugin.entries.size());
  auto entry = std::make_unique<Plugin::Entry>();
  entry->state = DeviceState::create(plugin.host, selector, std::move(name));
  if (entry->state != nullptr) plugin.entries.push_back(std::move(entry));
}

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, "1") == 0;
}

// A GPU is a device; the CPU executor is one only where tests ask for it, because hosts have kernels for the CPU
// themselves.
void add_devices(Plugin& plugin) {
  int32_t gpus = 0;
  if (nvb_cuda_get_device_count(&gpus) != NVB_OK) gpus = 0;
  for (int32_t ordinal = 0; ordinal < gpus; ++ordinal) add_device(plugin, "cuda:" + std::to_string(ordinal));
  if (plugin.entries.empty() && is_set("NVB_GGML_CPU")) add_device(plugin, "cpu");
}

// A host that loads the plug-in again gets the registration that it had: its devices live as long as the process does.
std::mutex registered_lock;
std::vector<std::unique_ptr<Plugin>>& registered() {
  // Never destroyed, because hosts use their devices in destructors of their own.
  static auto* list = new std::vector<std::unique_ptr<Plugin>>();
  return *list;
}

Registration* attach(const void* caller) {
  const std::lock_guard<std::mutex> lock(registered_lock);
  auto plugin = std::make_unique<Plugin>();
  if (!plugin->host.attach(caller)) return nullptr;
  for (const auto& earlier : registered()) {
    if (earlier->host.is(plugin->host)) return &earlier->registration;
  }
  if (nvb_abi_version() != NVB_ABI_VERSION) {
    plugin->host.log(LOG_ERROR, "nvbackend: not loaded: libnvbackend has ABI %u; this plug-in was made for %u\n",
                     nvb_abi_version(), static_cast<unsigned>(NVB_ABI_VERSION));
    return nullptr;
  }
  add_devices(*plugin);
  if (plugin->host.layout() == Layout::With2d) {
    fill<Tables_0_10>(*plugin);
  } else {
    fill<Tables_0_9>(*plugin);
  }
  plugin->registration = {API_VERSION, {registration_name, device_count, device_at, function_named}, plugin.get()};
  registered().push_back(std::move(plugin));
  return &registered().back()->registration;
}

}  // namespace
}  // namespace nvb_ggml

extern "C" {

__attribute__((visibility("default"))) nvb_ggml::Registration* ggml_backend_init() {
  try {
    return nvb_ggml::attach(__builtin_return_address(0));
  } catch (...) {
    return nullptr;
  }
}

// Hosts that look for the best of several files of one name take the highest; 0 would say that this one cannot run.
__attribute__((visibility("default"))) int ggml_backend_score() {
  return 1;
}
}
