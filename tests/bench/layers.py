"""Which layer a function belongs to.

A function counts where it stands, not for whom it was called: what `memcpy` costs the adapter's
driver is under memory.  The kernel proper has no directories left, so that its layers are found by
names; what no rule knows is under "other", and is to stay small.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from tests.bench.symbols import KERNEL, Place

UNKNOWN = "unknown"
#: Kernel modules, and files of the machine, by what their path has in it.
_MODULES = {
    "rdma_rxe": "kernel: Soft-RoCE",
    "crc32_pclmul": "kernel: Soft-RoCE",
    "crc32_generic": "kernel: Soft-RoCE",
    **dict.fromkeys(
        ("ib_core", "ib_uverbs", "ib_cm", "iw_cm", "rdma_cm", "rdma_ucm"), "kernel: RDMA core"
    ),
    **dict.fromkeys(("dummy", "udp_tunnel", "ip6_udp_tunnel"), "kernel: network, softirqs"),
}
_FILES = (
    ("/aiordma/_core/", "aiordma's C"),
    ("/aiordma/_ffi/", "aiordma's C"),
    ("_cffi_backend", "cffi"),
    ("/uvloop/", "uvloop"),
    ("/pyverbs/", "pyverbs"),
    ("/lib-dynload/_asyncio", "_asyncio"),
    ("/lib-dynload/", "other modules of Python in C"),
    ("/libibverbs", "libibverbs, librdmacm, provider"),
    ("/librdmacm", "libibverbs, librdmacm, provider"),
    ("/libc.so", "libc, vdso"),
    ("/libm.so", "libc, vdso"),
    ("/ld-linux", "libc, vdso"),
    ("[vdso]", "libc, vdso"),
    ("/usr/bin/ib_", "the program"),
    ("/usr/bin/cmtime", "the program"),
    ("/bench/floors.so", "the program"),
    ("/bench/connecting", "the program"),
    ("/bench/marks.so", "marks of the profile"),
    ("/libffi", "marks of the profile"),
)
_PYTHON = re.compile(r"/(libpython3[^/]*|python3[^/]*)$")
Rules = Sequence[tuple[str, str]]
#: The first that matches the beginning of a name.
_KERNEL_RULES: Rules = (
    (
        "kernel: idle",
        r"default_idle|do_idle|arch_cpu_idle|cpuidle|native_safe_halt|cpu_startup|tick_nohz_idle"
        r"|cpu_idle|acpi_idle|acpi_safe|poll_idle|call_cpuidle|menu_|haltpoll|ct_idle|idle_",
    ),
    ("kernel: Soft-RoCE", r"crc32|__crc32|crypto_|kernel_fpu|irq_fpu"),
    (
        "kernel: scheduler, work queues",
        r"_*schedule$|schedule_(idle|preempt)|psi_|record_times|_*update_(load|curr|rq|min|cfs)"
        r"|enqueue_(entity|task)|dequeue_(entity|task)|pick_next|put_prev|set_next|place_entity"
        r"|try_to_wake|ttwu|check_(preempt|spread|cfs)|select_(task|idle|estimate)|finish_task"
        r"|_*switch_|rcu_note|native_load_tls|load_new_mm|enter_lazy|cr4_|__[rw][rd]gsbase"
        r"|_*sched_|native_sched|cpuacct|clear_(buddies|tsk_need)|resched|kthread|smpboot|_*kthread"
        r"|save_fpregs|restore_fpregs|wakeup_|wake_up_(process|q|new)|hrtick|preempt_|_*cond_resched"
        r"|worker_|process_one_work|_*queue_(work|delayed)|insert_work|pwq_|wq_|kick_pool|move_linked"
        r"|find_worker|set_work|get_work|flush_work|_*calc_delta|delayed_work|wait_(task|for|rcu)"
        r"|complete|swake|do_wait_intr|prepare_to|finish_wait|init_wait|futex|_*futex|do_futex"
        r"|get_futex|reweight|attach_|detach_|load_balance|run_rebalance|newidle|rebalance|nohz_"
        r"|task_(tick|fork|h_load)|tg_|__task_rq|task_rq|native_write_msr|native_read_msr"
        r"|io_schedule|x2apic|amd_e400|read_hv|entity_",
    ),
    (
        "kernel: timers, clocks",
        r"_*hrtimer|_*timer|ktime|timekeep|tick_|clock|read_tsc|_*mod_timer|del_timer|try_to_del"
        r"|set_normalized|timespec|schedule_(hr)?timeout|get_nohz|_*(enqueue|remove)_hrtimer"
        r"|calc_wheel|lock_timer|detach_if|internal_add|enqueue_timer|jiffies|do_timer|run_timer"
        r"|add_timer|round_jiffies|__ktime|rcu_sched_clock|update_(process_times|wall_time)"
        r"|vtime|lapic|local_apic|_*sysvec_apic|apic|process_timeout|poll_select_set|posix_|account_",
    ),
    (
        "kernel: epoll, wake-ups of it",
        r"_*ep_|do_epoll|epoll|_*x64_sys_epoll|do_compat_epoll|_*wake_up|kill_fasync|epi_|__pm_relax"
        r"|poll_|_*pollwake|set_user_sigmask|eventpoll|do_(sys_)?poll|select_estimate|signalfd",
    ),
    (
        "kernel: network, softirqs",
        r"_*skb|_*alloc_skb|_*build_skb|kmalloc_reserve|_*ip_|ipv[46]|ip6|_*udp|_*dev_|neigh|_*neigh"
        r"|_*netif|process_backlog|_*net_|_*napi|eth_|_*dst_|rt_|_*fib_|siphash|_*tasklet"
        r"|handle_softirqs|_*do_softirq|_*local_bh|ksoftirqd|_*raise_softirq|_*sock|_*sk_|inet|arp_"
        r"|loopback|dummy|xfrm|nf_|enqueue_to_backlog|consume_skb|kfree_skb|validate_xmit|_*sys_send"
        r"|unix_|irq_(enter|exit)|_*irq_exit|invoke_softirq|sch_|qdisc|_*qdisc|__x64_sys_(recv|send)"
        r"|inetdev|in_dev|pskb|napi|get_rps|get_xps|packet_|tcp_|cookie_|move_addr|scm_|import_"
        r"|prandom|get_random|_*get_random|chacha|crng|_*crng|percpu_counter|register_netdev",
    ),
    (
        "kernel: memory",
        r"_*kmem|_*kmalloc|_*kfree|kvfree|_*kvmalloc|_*memset|_*memcpy|memmove|_*clear_page|mem_?cg"
        r"|_*mem_cgroup|.*slab|.*page|.*folio|.*vma|mas_|mab_|mast_|mtree|mt_|_*mm_|_*mmap|.*vmalloc"
        r"|.*vmap|_*alloc_|lru_|_*lru|charge|.*charge|get_mem|_*pte|_*pmd|_*pud|_*pgd|_*p4d|unmap|_*zap"
        r"|flush_tlb|tlb_|native_flush|_*sg_|_*get_user_pages|internal_get_user|pin_user|follow_"
        r"|unpin|policy_node|setup_object|cache_from|should_fail|_*find_vma|vm_|_*vm_|do_(m|user_addr)"
        r"|do_(anon|fault|wp|cow|swap|numa|brk|mas)|anon_vma|_*handle_mm|handle_pte|exc_page|asm_exc_page"
        r"|lock_mm|rmqueue|_*mod_(node|zone|memcg|lruvec|lru)|_*count_memcg|cgroup_rstat|_*cgroup_rstat"
        r"|put_cpu_partial|__slab|cmpxchg_double|rss_|sync_mm|add_mm|inc_(zone|node|mm)|dec_(zone|node)"
        r"|zone_|copy_mc|release_|mem_|percpu_ref|pcpu|free_|_*free_|is_vmalloc|get_(partial|any)"
        r"|memchr_inv|blk_cgroup|userfaultfd|wp_|pfn_|phys_|track_pfn|reserve_pfn|find_(next|first)_iomem"
        r"|arch_(get_unmapped|tlb)|get_unmapped|security_(mmap|vm)|apparmor_mmap|unlink_(file|anon)"
        r"|remove_(vm|vma)|mprotect|_*calc_vm|up_(read|write)|down_|rwsem|_*down_|_*up_|kasan|memtype"
        r"|dma_|_*dma|swiotlb|xas_store|lookup_memtype|refill|drain|vmstat|wb_|filemap|next_uptodate"
        r"|vmf_|arch_|ib_umem|_*obj_cgroup|obj_|current_obj|_*get_obj|shuffle|perf_event_(mmap|mu)"
        r"|khugepaged|split|try_to_free|try_charge|_*account|locked_vm|_*kernel_map|_*put_",
    ),
    (
        "kernel: system calls, files, checks",
        r"_*entry_|_*do_syscall|_*syscall_|x64_sys_call|_*x64_sys|ksys_|_*vfs_|exit_to_user|_*fget"
        r"|_*fput|_*fdget|rw_verify|security_|aa_|apparmor|tomoyo|bpf_lsm|_*fsnotify|_*do_sys|do_vfs"
        r"|amd_clear|irqentry|error_|sync_regs|blkcg|_*rseq|fpregs_|xfd_|copy_user|_*copy_|_*get_user"
        r"|_*put_user|_*check_(object|heap|stack)|check_stack|__virt_addr|memdup|str|_*str|asm_|ret_from"
        r"|swapgs|common_|_*sysvec|_*irqentry|read_|new_sync|task_work|signal|_*signal|get_signal"
        r"|sigprocmask|_*set_current_blocked|recalc|fil[ep]|alloc_fd|fd_install|close_fd|do_|path"
        r"|link_|lookup|walk|d_|_*d_|dput|mnt|_*mnt|inode|_*inode|i(ge|pu)t|may_|step_into|kernfs|sysfs"
        r"|seq_|proc_|single_|generic_|cap_|ns_|cred|_*cred|ima_|pipe_|eventfd|anon_inode|_*anon_inode"
        r"|_*task_pid|pid_|find_task|get_pid|put_pid|cdev|chrdev|dev_t|compat_|tty|terminate|nd_|set_root"
        r"|complete_walk|try_to_unlazy|legitimize|getname|putname|_*audit|vtime_user",
    ),
    (
        "kernel: locks, lists, trees",
        r"_*raw_|_*rcu|_*call_rcu|xa_|_*xa_|xas_|_*xas_|_*radix|_*list|_*mutex|_*srcu|rb_|_*rb_|_*rhash"
        r"|_*refcount|_*bitmap|_*find_(next|first|last)|idr|ida|_*ida|_*idr|lockref|osq|_*hash|llist"
        r"|klist|kref|kobject|interval|_*sort|sort|bsearch|wait_on|bit_|_*bit_|_*wait_|percpu|jhash",
    ),
)
_PYTHON_RULES: Rules = (
    (
        "CPython: memory, collector",
        r"gc_|visit_|.*dealloc|.*traverse|.*(?<!_)clear_(garbage|weakrefs)|_*PyObject_GC|_*PyObject_"
        r"(Free|Malloc|Calloc|Realloc|New|Init|IS_GC|DebugM)|_*PyMem|pymalloc|_PyMem|arena|new_arena"
        r"|_*Py_(Dealloc|NewReference|IncRef|DecRef)|PyType_GenericAlloc|.*_alloc$|subtype_clear"
        r"|untrack_|move_|delete_garbage|deduce|update_refs|subtract_refs|handle_weakrefs|_PyType_Alloc"
        r"|PyObject_ClearWeakRefs|insert_to_|address_in_range|_PyGC|has_finalizer|finalize_|_*PyWeakref"
        r"|.*_tp_clear|free_|.*_free$|maybe_freelist|_*PyTuple_(New|Pack|From)|_*PyList_New|_PyTrash",
    ),
    (
        "CPython: evaluation, frames",
        r"_*PyEval|eval_|_*PyFrame|initialize_locals|_*PyGen|gen_|coro|_*PyCoro|async_gen|_*PyAsync"
        r"|_*PyThreadState|_*PyErr|take_gil|drop_gil|_*PyCode|_PyInterpreterFrame|frame|create_gil"
        r"|_*Py_Handle|_*Py_Specialize|_Py_unset|trace_|call_trace|import_|PyImport|unpack_|tstate",
    ),
    (
        "CPython: attributes, dictionaries",
        r"_*PyDict|_*Py_dict|dict|unicodekeys|insert|lookdict|.*[Gg]et_?[Aa]ttr|.*[Ss]et_?[Aa]ttr"
        r"|_PyType_Lookup|PyType_IsSubtype|find_name|_*PyDescr|property|slot_tp_|super_|PyMember"
        r"|member_|getset|type_(get|set|is)|_*PyObject_(Lookup|Generic)|lookup|new_dict|build_indices"
        r"|_*PyType|_*PyObject_(Is|GetMethod)|recursive_is|object_is|abstract|_*Py_type|unicode_(hash|eq)|_PyUnicode_EQ"
        r"|_Py_Hash|siphash|wrap_|descr|resolve_|method_get|classmethod_get|cm_|sm_|functools_|lru_",
    ),
    (
        "CPython: calls",
        r".*[Cc]all|.*[Vv]ectorcall|method|_*PyMethod|cfunction|_*PyArg|vgetargs|_*PyStack|_init$"
        r"|.*CheckFunctionResult|_*PyCFunction|type_(call|new)|object_(init|new|vacall)|func|_*PyFunction"
        r"|slot_|_*Py_BuildValue|getargs|convert|skipitem|find_keyword|wrapper|classmethod|staticmethod"
        r"|partial|bound|PyCell|PyCMethod|context_run|_*PyContext|_*PyMapping|_*PyObject_(Has|FastCall)|builtin_",
    ),
    (
        "CPython: numbers, comparisons, time",
        r"_*PyLong|long_|x_|k_|_*PyFloat|float_|_*PyNumber|.*[Rr]ich[Cc]ompare|min_max|_*PyTime|time_"
        r"|binary_op|int_|bool_|pymonotonic|_*PyBool|do_richcompare|_Py_bit_length|maybe_small_long",
    ),
)
_PYTHON_OTHER, _KERNEL_OTHER = "CPython: other", "kernel: other"


def _order() -> tuple[str, ...]:
    """All layers, from the bottom to the top, what nobody knows last."""
    files = dict.fromkeys(layer for _, layer in _FILES)
    kernel = ["kernel: Soft-RoCE", "kernel: RDMA core", "kernel: network, softirqs"]
    kernel += [layer for layer, _ in _KERNEL_RULES if layer not in kernel]
    kernel.append(kernel.pop(kernel.index("kernel: idle")))
    python = [layer for layer, _ in _PYTHON_RULES]
    libraries = ["libc, vdso", "libibverbs, librdmacm, provider", "the program"]
    rest = [layer for layer in files if layer not in libraries]
    return (*kernel, _KERNEL_OTHER, *libraries, *python, _PYTHON_OTHER, *rest, UNKNOWN)


@functools.cache
def _rules(rules: Rules) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((layer, re.compile(pattern)) for layer, pattern in rules)


def _by_name(rules: Rules, name: str, otherwise: str) -> str:
    for layer, pattern in _rules(rules):
        if pattern.match(name):
            return layer
    return otherwise


def layer_of(place: Place) -> str:
    """The layer of a function."""
    file, name = place.file, place.function
    if file == KERNEL:
        return _by_name(_KERNEL_RULES, name, _KERNEL_OTHER)
    if file in _MODULES:
        return _MODULES[file]
    if _PYTHON.search(file):
        return _by_name(_PYTHON_RULES, name, _PYTHON_OTHER)
    for part, layer in _FILES:
        if part in file:
            return "cffi" if layer == "aiordma's C" and name.startswith("_cffi_") else layer
    # A module of the kernel that no rule names.
    return UNKNOWN if not file or file.startswith(("/", "[")) else _KERNEL_OTHER


LAYERS = _order()
