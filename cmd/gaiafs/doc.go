// Command gaiafs mounts a directory so that CPU and GPU programs can write its files together.
//
// # Model
//
// Every subcommand has its own file. mount.go reads the settings and either serves the mount in this process (serve.go)
// or starts a process that does (daemon.go). The other commands are clients of a running mount: they find it by its
// mountpoint and talk to it through the client library, as any program would.
//
// Settings come from flags, the environment and configuration files, in this order of precedence (settings.go,
// config.go). Devices are chosen by --gpus from the table in gpus.go.
//
// # Ending a mount
//
// ending.go takes a mount down in one order, whatever the reason. First, released bytes of devices go home while the
// mount is still in service. Then clients lose their connections; this releases what they wrote, and those bytes go
// home. Then the mount is unmounted, and the kernel's dirty pages go home with it. Last, the devices are closed. While
// home accepts no bytes, none of these steps happens: the mount stays, and is held (package fs) so that nobody unmounts
// it. `gaiafs umount` (umount.go) sends an END on the control socket, unmounts after the first step, and waits on its
// connection for the final result.
//
// # Exit codes
//
// 0: success. 1: failure; the last line on standard error says why and what to do. 2: the command line, the environment
// or a configuration file is wrong.
//
// # What it does not do
//
// It makes no decisions about files, pages or devices.
package main
