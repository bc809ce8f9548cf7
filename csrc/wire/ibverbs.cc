// wire/ibverbs: see ibverbs.h.
#include "ibverbs.h"

#include <dlfcn.h>

#include "../base.h"

namespace hdma::ibv {

namespace {

constexpr int kForkUnneeded = 2;

template <class Function>
void find(void *library, Function &function, const char *name, const char *version) {
    function = reinterpret_cast<Function>(dlvsym(library, name, version));
}

template <class Function>
void need(void *library, Function &function, const char *name) {
    // What has not changed since the first version is there under that one only.
    find(library, function, name, "IBVERBS_1.1");
    if (!function) find(library, function, name, "IBVERBS_1.0");
    if (!function)
        throw Error(Kind::Wire, format("libibverbs.so.1 has no %s: update rdma-core (libibverbs1)", name));
}

Functions open() {
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        throw Error(Kind::Wire, format("RDMA needs libibverbs, which cannot be loaded (%s): install libibverbs1 and "
                                       "ibverbs-providers (rdma-core), or set HDMA_WIRE=tcp", reason ? reason : "no reason"));
    }
    Functions f{};
    need(library, f.get_device_list, "ibv_get_device_list");
    need(library, f.free_device_list, "ibv_free_device_list");
    need(library, f.get_device_name, "ibv_get_device_name");
    need(library, f.open_device, "ibv_open_device");
    need(library, f.close_device, "ibv_close_device");
    need(library, f.query_device, "ibv_query_device");
    need(library, f.query_port, "ibv_query_port");
    need(library, f.query_gid, "ibv_query_gid");
    need(library, f.alloc_pd, "ibv_alloc_pd");
    need(library, f.dealloc_pd, "ibv_dealloc_pd");
    need(library, f.reg_mr, "ibv_reg_mr");
    need(library, f.dereg_mr, "ibv_dereg_mr");
    need(library, f.create_comp_channel, "ibv_create_comp_channel");
    need(library, f.destroy_comp_channel, "ibv_destroy_comp_channel");
    need(library, f.create_cq, "ibv_create_cq");
    need(library, f.destroy_cq, "ibv_destroy_cq");
    need(library, f.get_cq_event, "ibv_get_cq_event");
    need(library, f.ack_cq_events, "ibv_ack_cq_events");
    need(library, f.create_qp, "ibv_create_qp");
    need(library, f.modify_qp, "ibv_modify_qp");
    need(library, f.destroy_qp, "ibv_destroy_qp");
    need(library, f.get_async_event, "ibv_get_async_event");
    need(library, f.ack_async_event, "ibv_ack_async_event");
    need(library, f.wc_status_str, "ibv_wc_status_str");
    need(library, f.event_type_str, "ibv_event_type_str");
    need(library, f.fork_init, "ibv_fork_init");
    find(library, f.reg_dmabuf_mr, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
    find(library, f.is_fork_initialized, "ibv_is_fork_initialized", "IBVERBS_1.13");
    // Queues and completions lie in memory that a fork would copy on the next write, away from the device, unless the
    // kernel copies it in the child (from 5.12 on) or the library keeps it from the child. It refuses where another
    // library of this process has registered memory before: then that one has decided.
    if (!f.is_fork_initialized || f.is_fork_initialized() != kForkUnneeded) (void)f.fork_init();
    return f;
}

}  // namespace

const Functions &load() {
    static const Functions functions = open();
    return functions;
}

}  // namespace hdma::ibv
