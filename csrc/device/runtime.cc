// runtime: see runtime.h.
#include "runtime.h"

#include <dlfcn.h>

#include <mutex>

namespace hdma {

std::shared_ptr<Runtime> Runtime::load(const std::string &name) {
    static std::mutex mutex;
    static std::shared_ptr<Runtime> cuda, hip;  // Never unloaded: drivers do not like it.
    std::lock_guard<std::mutex> lock(mutex);
    auto &runtime = name == "hip" ? hip : cuda;
    if (!runtime) runtime = name == "hip" ? hip_runtime() : cuda_runtime();
    return runtime;
}

Library::Library(std::initializer_list<const char *> names, const char *what, const char *remedy) {
    std::string reasons;
    for (const char *name : names) {
        // Global: what the driver loads in its turn looks for it so.
        if ((library_ = dlopen(name, RTLD_NOW | RTLD_GLOBAL))) {
            name_ = name;
            return;
        }
        const char *reason = dlerror();
        reasons += std::string(reasons.empty() ? "" : "; ") + (reason ? reason : name);
    }
    throw Error(Kind::Device, format("%s: its library cannot be loaded (%s). %s", what, reasons.c_str(), remedy));
}

void *Library::symbol(const char *name, bool optional) const {
    void *found = dlsym(library_, name);
    if (!found && !optional)
        throw Error(Kind::Device, format("%s has no function %s: the driver is too old for hdma", name_.c_str(), name));
    return found;
}

}  // namespace hdma
