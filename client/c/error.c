/* The last failure of each thread. */
#include "internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last[GAIAFS_MAX_TEXT + 1];

int gaiafs_failed(struct gaiafs_fail *f, int errnum, const char *format, ...)
{
	va_list args;

	f->errnum = errnum > 0 ? errnum : EIO;
	va_start(args, format);
	if (vsnprintf(f->text, sizeof f->text, format, args) < 0)
		f->text[0] = '\0';
	va_end(args);
	return f->errnum;
}

void gaiafs_report(const struct gaiafs_fail *f)
{
	memcpy(last, f->text, sizeof last);
	last[sizeof last - 1] = '\0';
	errno = f->errnum;
}

const char *gaia_error(void)
{
	return last;
}
