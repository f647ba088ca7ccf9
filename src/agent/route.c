/*
 * The connection over which a session's messages go, and by which the session is found.
 */
#include "agent/session.h"

void kvf_session_forget_route(kvf_session *session) {
    if (session->hh_route.tbl)
        HASH_DELETE(hh_route, session->agent->by_route, session);
    memset(&session->hh_route, 0, sizeof session->hh_route);
}

void kvf_session_goes_by(kvf_session *session, kvf_route route) {
    if (session->route == route && session->hh_route.tbl)
        return;
    kvf_session_forget_route(session);
    session->former_route = session->route;
    session->route = route;
    HASH_ADD(hh_route, session->agent->by_route, route, sizeof session->route, session);
}
